"""Runs of the reference and of layouts, and the sizes that layouts allow. Processes and models are stand-ins."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from d9d_core.config import ModelConfig
from d9d_core.errors import BuildError, DataError, JobError, TrainingError
from d9d_core.plugin import ModelSpec, Ref, StrategySpec
from d9d_verify import layouts, run
from d9d_verify.compare import Verdict
from d9d_verify.layouts import Layout
from d9d_verify.measurement import Measurement

VALUES: dict[str, Any] = {
    "precision": {"autocast": None, "parameters": "float32"},
    "parallel": [{"name": "fsdp"}],
    "kernels": {"rope": "fast"},
    "pipeline": None,
    "run": {"dir": "nowhere", "name": "x"},
    "checkpoint": {},
    "batch": {"size": 6},
}


class Launches:
    """Launch of processes that writes nothing and fails as told."""

    def __init__(self, *failures: str | None) -> None:
        self.failures = list(failures)
        self.plans: list[tuple[str, int, Any]] = []
        self.jobs: list[dict[str, Any]] = []

    def __call__(self, directory: Path, ranks: int) -> str | None:
        self.plans.append((directory.name, ranks, json.loads((directory / "plan.json").read_text())))
        self.jobs.append(json.loads((directory / "job.json").read_text()))
        return self.failures.pop(0) if self.failures else None


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "read_all", lambda directory, ranks: (directory.name, ranks))


def reference(
    tmp_path: Path, launch: Launches, *more: Layout, values: dict[str, Any] = VALUES, routes: bool = False
) -> Any:
    several = [Layout("x", {"dp_shard": 2}, []), *more]
    return run._reference(values, ["rope", "norm"], several, 3, tmp_path / "reference", launch, routes=routes)


@pytest.mark.usefixtures("read")
def test_a_reference_has_variants_with_other_rounding_and_with_the_jobs_kernels(tmp_path: Path) -> None:
    launch = Launches()
    found = reference(tmp_path, launch)
    assert found == (("reference", 1), [("sound-0", 1), ("sound-1", 1)])
    assert launch.plans == [("reference", 1, {"steps": 3, "reference": None, "sound": 2})]
    directory = tmp_path / "reference"
    kernels = {"rope": "reference", "norm": "reference"}
    (own,) = launch.jobs
    assert (own["kernels"], own["mesh"], own["parallel"]) == (kernels, {}, [])
    assert own["run"]["dir"] == str(directory / "runs")
    variants = [json.loads((directory / f"sound-{index}.json").read_text()) for index in range(2)]
    assert [one["kernels"] for one in variants] == [kernels, {"rope": "fast"}]
    assert [one["run"]["dir"] for one in variants] == [str(directory / f"runs-{index}" / "runs") for index in range(2)]
    assert {json.dumps(one["precision"]) for one in variants} == {json.dumps(VALUES["precision"])}
    assert not (directory / "sound-2.json").exists()


@pytest.mark.usefixtures("read")
def test_a_strategy_that_uses_bfloat16_adds_a_variant_in_bfloat16(tmp_path: Path) -> None:
    launch = Launches()
    narrow = Layout("y", {"dp_shard": 2}, [{"name": "fsdp", "reduce": "bfloat16"}])
    reference(tmp_path, launch, narrow)
    assert launch.plans[0][2]["sound"] == 3
    third = json.loads((tmp_path / "reference" / "sound-2.json").read_text())
    assert third["precision"] == {"autocast": "bfloat16", "parameters": "float32"}
    assert third["kernels"] == {"rope": "reference", "norm": "reference"}
    all_narrow = {**VALUES, "precision": {"autocast": None, "parameters": "bfloat16"}}
    (tmp_path / "second").mkdir()
    reference(tmp_path / "second", launch, values=all_narrow)
    assert launch.plans[1][2]["sound"] == 2


@pytest.mark.usefixtures("read")
def test_a_model_that_routes_in_bfloat16_has_more_variants_of_the_narrowest_kind(tmp_path: Path) -> None:
    launch = Launches()
    narrow = Layout("y", {"dp_shard": 2}, [{"name": "fsdp", "reduce": "bfloat16"}])
    reference(tmp_path, launch, narrow, routes=True)
    assert launch.plans[0][2]["sound"] == 5
    third, last = ((tmp_path / "reference" / f"sound-{index}.json").read_text() for index in (2, 4))
    assert json.loads(third)["precision"] == json.loads(last)["precision"]
    (tmp_path / "wide").mkdir()
    reference(tmp_path / "wide", launch, routes=True)
    assert launch.plans[1][2]["sound"] == 2


@pytest.mark.usefixtures("read")
def test_a_reference_that_fails_is_an_error_with_its_cause(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="^verify: the reference could not be measured: out of memory$"):
        reference(tmp_path, Launches("out of memory"))


@pytest.mark.usefixtures("read")
def test_a_layout_gets_the_directory_of_the_reference(tmp_path: Path) -> None:
    launch = Launches(None, "killed")
    there = tmp_path / "reference"
    assert run._run(VALUES, 4, 2, tmp_path / "0", launch, there) == ("0", 4)
    assert run._run(VALUES, 4, 2, tmp_path / "1", launch, there) == "killed"
    assert launch.plans[0] == ("0", 4, {"steps": 2, "reference": str(there), "sound": 0})
    assert launch.jobs[0]["checkpoint"]["dir"] == str(tmp_path / "0" / "checkpoints")


def test_a_layout_that_a_job_cannot_have_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    class Job:
        @staticmethod
        def from_values(values: Any, registry: Any) -> Any:
            if values == "wrong":
                raise JobError("heads")
            return SimpleNamespace(check=asked.append)

    monkeypatch.setattr(run, "Job", Job)
    job: Any = SimpleNamespace(registry=None)
    layout = Layout("tp=2:tp", {"tp": 2, "dp_shard": 3}, [])
    run._check(job, {}, layout)
    assert asked == [6]
    wrong: Any = "wrong"
    with pytest.raises(JobError, match="^verify: layout tp=2:tp: heads$"):
        run._check(job, wrong, layout)


def test_each_layout_is_told_run_and_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    ran: list[Any] = []
    judged: list[Any] = []
    nothing: Any = None

    def measured(values: Any, ranks: int, steps: int, directory: Path, launch: Any, there: Path) -> Any:
        ran.append((values["mesh"], ranks, steps, directory.name, launch, there.name))
        return "out of memory" if ranks == 2 else Measurement({}, {})

    def compare(name: str, found: Any, expected: Any, limits: Any) -> Verdict:
        judged.append((name, expected, limits))
        return Verdict(name, 0.0, 0.0, (0.0, "a"), (0.0, "a"), (0.0, "a"), None)

    limits = SimpleNamespace(of=lambda dtype, one, sound: (dtype, one, sound))
    for name, value in {
        "scaled_values": lambda job, given, steps: (
            {**VALUES, "batch": {"size": steps}} if job is nothing and given is several else {}
        ),
        "ops_of": lambda *_: ["rope"],
        "_check": lambda *given: ran.append(("checked", given[2].name)),
        "scaled_model": lambda job, values: {(None, 4): torch.nn.Identity()}[job, values["batch"]["size"]],
        "layout_dependence": lambda _model: ["it draws"],
        "_altered": lambda job, layout: [f"{layout.name} has its own steps"] if job is nothing else [],
        "_reference": lambda *_, routes: ("measured" if not routes else "routed", ["sound"]),
        "_run": measured,
        "Limits": limits,
        "compare": compare,
        "compared": lambda reference: f"all of {reference}",
        "_settings": lambda directory, steps: f"settings of {directory.name} for {steps}",
        "_checkpoint": lambda _directory: None,
        "unlike_saved": lambda *_: None,
        "unlike_state": lambda *_: None,
    }.items():
        monkeypatch.setattr(run, name, value)
    several = [Layout("one", {"dp_shard": 1}, []), Layout("two", {"dp_shard": 2}, [])]
    launch: Any = "launch"
    verdicts = run.verify(nothing, several, 4, notes.append, launch)
    assert notes == [
        "this model computes differently in different layouts by design: it draws",
        "one has its own steps",
        "two has its own steps",
        "reference: one process, 4 steps, batch 4",
        "one: 1 process",
        "two: 2 processes",
        "compared: all of measured; settings of reference for 4",
    ]
    assert ran == [
        ("checked", "one"),
        ("checked", "two"),
        ({"dp_shard": 1}, 1, 4, "0", "launch", "reference"),
        ({"dp_shard": 2}, 2, 4, "1", "launch", "reference"),
    ]
    assert [(verdict.layout, verdict.passed) for verdict in verdicts] == [("one", True), ("two", False)]
    assert verdicts[1].diverged == (0, "failed: out of memory")
    assert judged == [("one", "measured", (torch.float32, "measured", ["sound"]))]


# --- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("microbatches", "least", "found"), [(1, 1, 2), (2, 1, 2), (5, 1, 3), (1, 6, 6), (5, 11, 11)])
def test_all_layouts_get_as_many_microbatches_as_the_widest_pipeline_needs(
    monkeypatch: pytest.MonkeyPatch, microbatches: int, least: int, found: int
) -> None:
    def programs(schedule: Any, ranks: int, count: int) -> Any:
        if count < least:
            raise BuildError(f"{count} are too few")
        return schedule * ranks

    monkeypatch.setattr(layouts, "_schedule", lambda _job, layout: 3 if "pp" in layout.mesh else None)
    monkeypatch.setattr(layouts, "checked_programs", programs)
    monkeypatch.setattr(layouts, "count_stages", lambda programs: programs)
    job: Any = SimpleNamespace(microbatches=microbatches)
    several = [Layout("a", {"pp": 2}, []), Layout("b", {}, [])]
    assert layouts._stages(job, several) == (found, [6, 1])


def test_a_pipeline_that_no_number_of_microbatches_suits_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def programs(_schedule: Any, _ranks: int, count: int) -> Any:
        asked.append(count)
        raise BuildError(f"{count} are too few")

    monkeypatch.setattr(layouts, "_schedule", lambda *_: "schedule")
    monkeypatch.setattr(layouts, "checked_programs", programs)
    job: Any = SimpleNamespace(microbatches=1)
    with pytest.raises(BuildError, match="^10 are too few$"):
        layouts._stages(job, [Layout("a", {"pp": 2}, [])])
    assert asked == list(range(2, 11))


def test_a_larger_batch_needs_enough_data_for_training_and_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def opened(_job: Any, chosen: Any, config: Any, batch: int, microbatch: int) -> None:
        asked.append((chosen, config, batch, microbatch))
        if config == "small":
            raise DataError("too few samples")

    monkeypatch.setattr(layouts, "_open", opened)
    job: Any = SimpleNamespace(data="large")
    selection: Any = SimpleNamespace(dataset="data", evaluation=[("set", "other")])
    assert layouts._has_data(job, selection, 8)
    assert asked == [("data", "large", 8, 1), ("set", "other", 8, 1)]
    selection.evaluation = [("set", "small")]
    assert not layouts._has_data(job, selection, 8)


class Model(ModelConfig):
    """Sizes of a model."""

    name: str = "m"
    heads: int = 16
    hidden: int = 64
    words: int = 500
    layers: int = 1
    bias: bool = True


class Tiny(Ref):
    def load(self) -> Any:
        return lambda: Model(heads=2, hidden=4, words=10, layers=2, bias=False)


@dataclass
class Task:
    """Task that a model of at least four heads can have."""

    def check(self, config: Model, facts: Any) -> None:
        assert facts == {"words": 500}
        if config.heads < 4:
            raise JobError("heads\nand more")


def test_a_model_gets_tiny_sizes_unless_data_task_or_meshes_need_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = Ref("nowhere:x")
    spec = ModelSpec(name="m", summary="x", config=nowhere, build=nowhere, tiny=Tiny("my:tiny"))
    divided: list[Any] = []
    monkeypatch.setattr(layouts, "_facts", lambda *_: {"words": 500})
    monkeypatch.setattr(
        layouts, "instantiate", lambda chosen, config, *stage: Task() if chosen == "task" else (config, *stage)
    )
    monkeypatch.setattr(layouts, "joined_stages", lambda parts: parts)

    def check(parts: Any, sizes: dict[str, int]) -> None:
        divided.append((len(parts), [part[1].index for part in parts], sizes))
        if parts[0][0].hidden % sizes["tp"]:
            raise BuildError("hidden")

    monkeypatch.setattr(layouts, "check_divisibility", check)
    job: Any = SimpleNamespace(
        model=Model(),
        task=None,
        mesh=SimpleNamespace(sizes=lambda: {"tp": 1, "pp": 1, "dp_shard": 3}),
        parallel=[],
        kernels={"attention": "sdpa"},
    )
    selection: Any = SimpleNamespace(model=SimpleNamespace(spec=spec), task="task")
    found: Any = layouts._tiny(job, selection, [Layout("a", {"tp": 4}, []), Layout("b", {"pp": 2}, [])], [1, 2])
    # The vocabulary is the data's, layers of the family's tiny model are more, and truth values are no sizes.
    assert (found.heads, found.hidden, found.words, found.layers, found.bias) == (16, 4, 500, 1, True)
    assert (1, [0], {"tp": 4, "pp": 1, "dp_shard": 1}) in divided
    assert (2, [0, 1], {"tp": 1, "pp": 2, "dp_shard": 1}) in divided
    wide: Any = layouts._tiny(job, selection, [Layout("a", {"tp": 8}, [])], [1])
    assert (wide.heads, wide.hidden) == (16, 64)
    bare = SimpleNamespace(model=SimpleNamespace(spec=ModelSpec(name="m", summary="x", config=nowhere, build=nowhere)))
    bare.task = "task"  # type: ignore[attr-defined]
    own: Any = layouts._tiny(job, bare, [Layout("a", {}, [])], [1])  # type: ignore[arg-type]
    assert own == Model()


def test_data_is_opened_with_the_tokenizer_of_the_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(layouts, "instantiate", lambda *given: given)
    job: Any = SimpleNamespace(seed=7, run=SimpleNamespace(cache=tmp_path), model=Model(pretrained="there"))
    chosen: Any = "chosen"
    config: Any = "config"
    found: Any = layouts._open(job, chosen, config, 8, 2)
    assert found[:2] == ("chosen", "config")
    context = found[2]
    assert (context.seed, context.batch_size, context.microbatch_size) == (7, 8, 2)
    assert (context.cache_dir, context.pretrained) == (tmp_path, "there")
    job.model = object()
    assert layouts._open(job, chosen, config, 8, 2)[2].pretrained is None  # type: ignore[index]


def test_reasons_why_layouts_differ_by_design_are_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Draws:
        def layout_dependence(self) -> list[str]:
            return ["it draws", "it waits"]

    monkeypatch.setattr(layouts, "modules_with", lambda _stage, _trait: {"a": Draws(), "b": Draws()})
    stage: Any = None
    assert layouts.layout_dependence(stage) == ["it draws", "it waits"]


def test_a_verified_job_loads_the_plugins_of_this_process(tmp_path: Path) -> None:
    origins = [
        SimpleNamespace(distribution="d9d-core", digest=""),
        SimpleNamespace(distribution="zeta", digest=""),
        SimpleNamespace(distribution="acme", digest=""),
        SimpleNamespace(distribution=str(tmp_path / "b.py"), digest="1"),
        SimpleNamespace(distribution=str(tmp_path / "a.py"), digest="2"),
    ]
    job: Any = SimpleNamespace(registry=SimpleNamespace(plugins=origins))
    assert layouts._plugins(job) == {
        "allow": ["acme", "zeta"], "files": [str(tmp_path / "a.py"), str(tmp_path / "b.py")],
    }  # fmt: skip


def test_a_strategy_that_alters_the_training_is_announced_with_the_values_that_are_compared() -> None:
    def found(_kind: str, name: str) -> Any:
        here = Ref("builtins:int")
        own = name == "own_steps"
        spec = StrategySpec(name=name, summary=name, config=here, build=here, anchor="data", alters_training=own)
        return SimpleNamespace(spec=spec)

    job = cast("Any", SimpleNamespace(registry=SimpleNamespace(find=found)))
    (line,) = run._altered(job, Layout("both", {"dp_replicate": 2}, ["fsdp", {"name": "own_steps"}]))
    assert line.startswith("both: with own_steps, replicas take their own steps by design; compared are the means of t")
    assert list(run._altered(job, Layout("one", {}, ["fsdp"]))) == []
