"""Parts of evaluations, the library call and the commands, with stand-ins."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from d9d_core.errors import CheckpointError, D9dError
from d9d_core.metric import Table
from d9d_inference import compose
from d9d_inference import job as job_module
from d9d_inference.commands import infer, model_files
from d9d_inference.evaluation import compose as evaluation
from d9d_inference.evaluation import library
from d9d_inference.evaluation.compose import Options, evaluate
from d9d_inference.evaluation.result import Report
from d9d_inference.job import InferenceJob
from torch import nn

# --- evaluations ------------------------------------------------------------------------------------------------------


def test_two_models_are_compared_by_the_losses_of_single_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    @dataclass
    class Losses:
        of: str

        def difference(self, other: Losses, name: str) -> Any:
            return (self.of, other.of, name)

    def evaluated(subject: Any, topology: Any, note: Any, options: Options) -> Any:
        asked.append((subject, topology, note, options))
        return f"values of {subject}", {"": Losses(subject), "set": Losses(subject)}

    monkeypatch.setattr(evaluation, "_evaluated", evaluated)
    first, second, topology, note = "first", "second", "topology", print
    one: Any = evaluate(first, topology, note, 3)  # type: ignore[arg-type]
    assert one == Report("values of first")  # type: ignore[arg-type]
    both: Any = evaluate(first, topology, note, None, second)  # type: ignore[arg-type]
    assert both == Report(  # type: ignore[arg-type]
        "values of first",  # type: ignore[arg-type]
        "values of second",  # type: ignore[arg-type]
        {"": ("first", "second", ""), "set": ("first", "second", "set")},  # type: ignore[dict-item]
    )
    assert asked == [
        ("first", "topology", print, Options(3, False)),
        ("first", "topology", print, Options(None, True)),
        ("second", "topology", print, Options(None, True)),
    ]


def test_values_of_a_set_lose_its_prefix() -> None:
    assert evaluation._under("eval/a/", {"eval/a/loss": 1, "eval/b/loss": 2, "eval/a/x/y": 3}) == {"loss": 1, "x/y": 3}
    names = ["a", "b"]
    recorder: Any = SimpleNamespace(gather=lambda name, group: (name, group))
    group: Any = "group"
    assert evaluation._losses(recorder, names, group) == {"a": ("a", "group"), "b": ("b", "group")}
    assert evaluation._losses(None, names, group) == {}


def test_metrics_of_modules_are_left_out_of_an_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    class OfStages:
        pass

    monkeypatch.setattr(evaluation, "StageMetric", OfStages)
    monkeypatch.setattr(evaluation, "instantiate", lambda chosen, _config: chosen())
    selection: Any = SimpleNamespace(evaluation_metrics=[(OfStages, 1), (list, 2)])
    assert evaluation._over_outputs(selection) == [(list, 2)]


def test_the_checkpoint_of_an_evaluation_is_chosen_by_step_or_word(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    found: dict[str, Any] = {"checkpoint": "checkpoint"}

    def choose(store: Any, which: Any, note: Any) -> Any:
        asked.append((store, which))
        return found["checkpoint"]

    monkeypatch.setattr(evaluation, "choose_checkpoint", choose)
    monkeypatch.setattr(evaluation, "open_store", lambda *given, write: (given, write))
    topology: Any = "topology"

    def of(run: str | None, checkpoint: str) -> Any:
        subject: Any = SimpleNamespace(run=run, checkpoint=checkpoint, job="job", name="a model")
        return evaluation._checkpoint(subject, topology, print)

    assert of(None, "newest") is None
    assert of("run", "best") == "checkpoint"
    assert of("run", "100") == "checkpoint"
    assert asked == [((("job", "topology", print), False), which) for which in ("best", 100)]
    found["checkpoint"] = None
    with pytest.raises(CheckpointError, match=r"^a model: the run has no checkpoint; train first \(d9d train\)"):
        of("run", "newest")


@dataclass
class Saved:
    """Checkpoint with the given tensors."""

    tensors: dict[str, torch.Tensor]
    manifest: dict[str, Any] = field(default_factory=dict)
    asked: list[Any] = field(default_factory=list)

    def load_into(self, wanted: Any, scope: str, left_out: Any = frozenset(), only: bool = False) -> None:
        self.asked.append((sorted(wanted), scope, set(left_out), only))
        for name, tensor in wanted.items():
            if name not in left_out:
                tensor.detach().copy_(self.tensors[name])


def test_weights_of_a_checkpoint_are_loaded_and_averaged(monkeypatch: pytest.MonkeyPatch) -> None:
    tied: list[Any] = []
    monkeypatch.setattr(evaluation, "find_ties", lambda *given: SimpleNamespace(copy_values=lambda: tied.append(given)))
    model = nn.Linear(2, 1)
    assembly = SimpleNamespace(stages=1, shared=2, trainable=3, pipeline=4)
    forward: Any = SimpleNamespace(assembly=assembly, model=model)
    slots = {"optimizer/weight/average": {"dtype": "float64"}}
    saved: Any = Saved(
        {
            "model/weight": torch.tensor([[1.0, 2.0]]),
            "model/bias": torch.tensor([3.0]),
            "optimizer/weight/average": torch.tensor([[5.0, 10.0]], dtype=torch.float64),
        },
        {"tensors": slots, "average": {"slot": "average", "weight": 0.25}, "left_out": ["model/bias", "model/other"]},
    )
    nn.init.constant_(model.bias, 7.0)
    topology: Any = "topology"
    evaluation._load(saved, forward, topology)
    assert model.weight.tolist() == [[2.0, 4.0]]
    assert model.bias.tolist() == [7.0]
    assert saved.asked == [
        (["model/bias", "model/weight"], "model/", {"model/bias"}, False),
        (["optimizer/weight/average"], "optimizer/", set(), True),
    ]
    assert tied == [(1, 2, 3, 4, "topology")]
    plain: Any = Saved(saved.tensors, {"tensors": {}})
    evaluation._load(plain, forward, topology)
    assert (model.weight.tolist(), model.bias.tolist()) == ([[1.0, 2.0]], [3.0])


def test_an_evaluated_model_is_named_with_its_step() -> None:
    subject: Any = SimpleNamespace(name="a run")
    checkpoint: Any = SimpleNamespace(step=5)
    assert evaluation._origin(subject, None) == "a run"
    assert evaluation._origin(subject, checkpoint) == "a run, step 5"


class Task:
    inputs = "inputs"


class TwoPass(Task):
    pass


@pytest.mark.parametrize(
    ("manifest", "task", "drawn"),
    [(None, Task(), True), ({}, Task(), False), ({"left_out": ["x"]}, Task(), True), ({}, TwoPass(), True)],
)
def test_an_evaluation_measures_each_set_once_with_the_weights_of_the_checkpoint(
    monkeypatch: pytest.MonkeyPatch, manifest: dict[str, Any] | None, task: Any, drawn: bool
) -> None:
    """Pretrained weights are read only if a checkpoint does not replace them all, or a first pass needs them."""
    did: list[Any] = []
    notes: list[str] = []
    checkpoint = None if manifest is None else SimpleNamespace(step=5, manifest=manifest)
    assembly = SimpleNamespace(stages="stages", full_model="full", ownership=None, reducers=())

    @dataclass
    class Root:
        job: Any
        made: tuple[Any, ...] = ()

    @dataclass
    class OfJob:
        loading: Any
        evaluation: Any
        batch: Any

        def model_copy(self, update: dict[str, Any]) -> Any:
            return OfJob(**{**vars(self), **update})

    class Bar:
        def __init__(self, what: str, total: int, shown: bool) -> None:
            did.append(("bar", what, total, shown))

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: object) -> None: ...

        def add(self, count: int) -> None:
            did.append(("add", count))

    class Evaluator:
        def __init__(self, *given: Any) -> None:
            did.append(("evaluator", *given[:5], *given[6:]))
            self._beat = given[5]
            self.counted = {"a": 11, "b": 12}

        def run(self, tables: Any) -> dict[str, float]:
            self._beat()
            tables({"eval/a/t": Table(torch.tensor([[1.0, 2.0]])), "eval/b/t": Table(torch.tensor([[3.0]]))})
            return {"eval/a/loss": 1.0, "eval/b/loss": 2.0}

    @dataclass
    class Loading:
        weights: bool = True

        def model_copy(self, update: dict[str, Any]) -> Any:
            return Loading(**update)

    job = OfJob(Loading(), SimpleNamespace(datasets={"a": 1, "b": 2}), SimpleNamespace(size=4))
    selection = SimpleNamespace(task="chosen", evaluation=["part a", "part b"], evaluation_metrics=[])
    subject_job = SimpleNamespace(check_layout=lambda ranks: did.append(("ranks", ranks)) or selection, registry="r")
    watchdog = SimpleNamespace(phase=lambda *given: did.append(("phase", *given)), beat=lambda: did.append("beat"))
    topology: Any = SimpleNamespace(
        world_size=2, is_main=True, device="cpu", watchdog=watchdog, axes_group=lambda *axes: ("group", *axes)
    )

    def build_set(surroundings: Any, name: str, part: Any, *rest: Any) -> Any:
        did.append(("set", name, part, *rest))
        close = lambda: did.append(("closed", name))  # noqa: E731
        return SimpleNamespace(
            name=name, prefix=f"eval/{name}/", packs={"a": 3, "b": 5}[name], prefetcher=SimpleNamespace(close=close)
        )

    def build_forward(root: Any, *given: Any) -> Any:
        did.append(("weights", root.job.loading.weights))
        return SimpleNamespace(executor="executor", model="model", assembly=assembly)

    of: dict[str, Any] = {
        "compose_root": lambda *given: Root(given[0], given),
        "build_task": lambda *_: task,
        "CheckedTask": lambda *_: SimpleNamespace(inputs="inputs"),
        "assemble_forward": lambda _root: assembly,
        "_checkpoint": lambda *_: checkpoint,
        "TwoPassTask": TwoPass,
        "build_forward": build_forward,
        "AuxiliaryLosses": lambda *_: None,
        "Tallies": lambda *_: None,
        "Gradients": lambda *_, **__: None,
        "Statistics": lambda *_, **more: did.append(("statistics", more)),
        "build_first_pass": lambda *_: "first pass",
        "Surroundings": lambda *given: given,
        "build_set": build_set,
        "_load": lambda *given: did.append(("loaded", given[0].step)),
        "SampleBar": Bar,
        "Evaluator": Evaluator,
        "likelihood_of": lambda _task: "likelihood",
        "SampleRecorder": lambda _task: SimpleNamespace(gather=lambda name, _group: f"losses of {name}"),
    }
    for name, value in of.items():
        monkeypatch.setattr(evaluation, name, value)
    subject: Any = SimpleNamespace(job=subject_job, name="a run")
    monkeypatch.setattr(evaluation, "Subject", SimpleNamespace)
    subject.job.__dict__.update(vars(job))
    subject.job.model_copy = job.model_copy
    found, losses = evaluation._evaluated(subject, topology, notes.append, Options(7, True))
    group = ("group", "pp", "dp_replicate", "dp_shard", "cp")
    assert did[0] == ("ranks", 2)
    assert ("weights", drawn) in did
    assert ("statistics", {"gated": False, "group": group, "device": "cpu"}) in did
    sets = [one for one in did if one[0] == "set"]
    assert sets == [
        ("set", "a", "part a", None, [], "first pass", 7),
        ("set", "b", "part b", None, [], "first pass", 7),
    ]
    loaded = [] if checkpoint is None else [("loaded", 5)]
    rest = did[did.index(sets[-1]) + 1 :]
    assert rest[: len(loaded) + 2] == [*loaded, ("phase", "step", 0), ("bar", "evaluation", 32, True)]
    assert [one for one in rest if one == "beat" or one[0] in ("add", "closed")] == [
        "beat", ("add", 4), ("closed", "a"), ("closed", "b"),
    ]  # fmt: skip
    assert notes == [f"model: {'a run' if checkpoint is None else 'a run, step 5'} on cpu"]
    assert (found.name, found.step) == ("a run", None if checkpoint is None else 5)  # type: ignore[attr-defined]
    assert list(vars(found).values())[2:] == [
        {"a": {"loss": 1.0}, "b": {"loss": 2.0}},
        {"a": 11, "b": 12},
        {"a": {"t": [[1.0, 2.0]]}, "b": {"t": [[3.0]]}},
    ]
    assert losses == {"a": "losses of a", "b": "losses of b"}


# --- the library call, and commands -----------------------------------------------------------------------------------


def test_a_library_call_evaluates_on_the_data_of_the_first_model(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    checked: list[int] = []

    def find(target: Any, request: Any, registry: Any) -> Any:
        asked.append((target, request.like, request.checkpoint, request.world_size, registry))
        return SimpleNamespace(job=SimpleNamespace(check=checked.append), name=target)

    monkeypatch.setattr(library, "find_subject", find)
    monkeypatch.setattr(library, "discover", lambda _policy: "discovered")
    monkeypatch.setattr(library, "same_data", lambda other, first: ("same data", other.name, first.name))
    monkeypatch.setattr(library, "exits_are_errors", nullcontext)
    measured: list[Any] = []
    monkeypatch.setattr(evaluation, "evaluate", lambda *given: measured.append(given) or "report")
    notes: list[str] = []
    topology: Any = SimpleNamespace(world_size=3, is_main=True)
    found: Any = library.evaluate(
        Path("run"), like="like.yaml", checkpoint=100, limit=5, compare="other", note=notes.append, topology=topology
    )
    assert found == "report"
    first, second = asked
    assert first == ("run", Path("like.yaml"), "100", 3, "discovered")
    assert (second[0], second[2], second[3]) == ("other", None, 3)
    assert second[1] is not None
    assert checked == [3]
    ((subject, given, note, limit, other),) = measured
    assert (subject.name, given, limit, other) == ("run", topology, 5, ("same data", "other", "run"))
    note("x")
    assert notes == ["x"]
    topology.is_main = False
    library.evaluate("run", topology=topology, note=notes.append)
    (_, _, note, limit, other) = measured[1]
    note("y")
    assert (notes, limit, other) == (["x"], None, None)


@pytest.mark.parametrize(
    ("status", "main", "lines"), [("finished", True, 2), ("stopped", True, 0), ("finished", False, 0)]
)
def test_the_main_process_tells_the_values_and_rows_of_a_finished_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], status: str, main: bool, lines: int
) -> None:
    built: list[Any] = []
    outcome = SimpleNamespace(status=status, values={"accuracy": 0.123456789}, samples=12_345)
    inference = SimpleNamespace(run=lambda: outcome, store=SimpleNamespace(output="there/output.jsonl"))
    loaded = SimpleNamespace(build=lambda **given: built.append(given) or inference)
    topology = SimpleNamespace(is_main=main)

    @contextmanager
    def joined(*given: Any) -> Any:
        assert given[4] == "computed"
        yield loaded, topology, "start", True

    monkeypatch.setattr(infer, "joined_process", joined)
    monkeypatch.setattr(infer, "start_up", lambda *_: nullcontext())
    process, interrupts, load = SimpleNamespace(stop_status=75), "interrupts", print
    ended = infer._infer(process, interrupts, load)  # type: ignore[arg-type]
    assert ended == (75 if status == "stopped" else 0)
    assert built == [{"topology": topology, "observers": ["start"], "interrupts": "interrupts", "owning": True}]
    assert capsys.readouterr().out.splitlines() == [
        "accuracy 0.123457", "finished 12,345 samples; rows in there/output.jsonl",
    ][:lines]  # fmt: skip


def test_a_checkpoint_is_exported_with_the_tokenizer_of_its_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    conversions: list[Any] = []
    copied: list[Any] = []
    place = {"run": tmp_path}
    monkeypatch.setattr(model_files, "Place", SimpleNamespace(of=lambda _checkpoint: SimpleNamespace(**place)))
    monkeypatch.setattr(model_files, "convert_state", lambda asked, registry: conversions.append((asked, registry)))
    monkeypatch.setattr(model_files, "_copy_tokenizer", lambda *given: copied.append(given))
    monkeypatch.setattr(model_files, "_origin", lambda run: f"origin of {run}")
    registry: Any = "registry"
    model_files._export("checkpoint", tmp_path / "target", registry, print)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    model_files._export("checkpoint", tmp_path / "target", registry, print)
    assert [(one.source, one.target, one.keep_from, given) for one, given in conversions] == [
        ("checkpoint", str(tmp_path / "target"), f"origin of {tmp_path}", "registry"),
        ("checkpoint", str(tmp_path / "target"), str(tmp_path / "model"), "registry"),
    ]
    assert copied == [(tmp_path / model_files.TOKENIZER, tmp_path / "target", print)] * 2
    place["run"] = None  # type: ignore[assignment]
    model_files._export("checkpoint", tmp_path / "target", registry, print)
    assert conversions[-1][0].keep_from == "origin of None"
    assert len(copied) == 2

    def fails(*_: object) -> None:
        raise D9dError("no tensors")

    monkeypatch.setattr(model_files, "convert_state", fails)
    with pytest.raises(CheckpointError, match="^checkpoint cannot be exported: no tensors$"):
        model_files._export("checkpoint", tmp_path / "target", registry, print)


def test_an_inference_job_is_checked_with_its_forward_only_program(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    resolution = SimpleNamespace(selection="selection")
    pipeline = SimpleNamespace(forward_program=lambda *given: asked.append(given))
    (base,) = InferenceJob.__bases__[:1]
    monkeypatch.setattr(base, "check", lambda _job, world_size: asked.append(world_size) or resolution)
    monkeypatch.setattr(job_module, "plan_pipeline", lambda *given: asked.append(given) or pipeline)
    monkeypatch.setattr(InferenceJob, "microbatches", 7)
    job: Any = InferenceJob.model_construct()
    assert job.check(3) is resolution
    assert asked == [3, (job, "selection"), (0, 7)]


def test_an_inference_job_is_built_from_its_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compose, "build_inference", lambda *given: given)
    job: Any = InferenceJob.model_construct()
    monkeypatch.setattr(InferenceJob, "composed", lambda _job, *given: nullcontext(("root", *given)))
    assert job.build("note", "topology", "observers", "interrupts", True) == (
        ("root", "note", "topology"), "observers", "interrupts", True,
    )  # fmt: skip
