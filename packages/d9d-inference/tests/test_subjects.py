"""Subject of an evaluation: kinds of targets, checkpoints of runs, changed layouts, and the data of a comparison."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from d9d_core.errors import JobError
from d9d_core.plugin import ModelSpec, Ref, StrategySpec
from d9d_core.registry.policy import PluginPolicy
from d9d_core.registry.registry import Registry
from d9d_inference.evaluation import subject
from d9d_inference.evaluation.subject import Request, Subject, find_subject, same_data

NO_REGISTRY = cast("Registry", None)


class Loads:
    """Stand-in of loading: tells how a job was loaded, and what became of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loaded: list[Any] = []
        monkeypatch.setattr(subject, "_of_job", self.of_job)
        monkeypatch.setattr(subject.Request, "load", lambda request, path: self.load("own", path, request))
        monkeypatch.setattr(subject.Request, "load_saved", lambda request, path: self.load("saved", path, request))

    def load(self, how: str, path: Path, request: Request) -> Any:
        self.loaded.append((how, path, request.checkpoint))
        return Job(directory=path.parent)

    def of_job(self, target: str, job: Any, request: Request) -> Subject:
        return Subject(target, job, False, request.checkpoint or "newest")


class Job:
    """Stand-in of a run's job."""

    def __init__(self, directory: Path, processes: int = 1) -> None:
        self.run = SimpleNamespace(directory=directory, name="n", model_copy=lambda update: update)
        self.mesh = SimpleNamespace(world_size=processes)
        self.registry, self.source = "registry", "source"

    def model_copy(self, update: dict[str, Any]) -> Job:
        self.moved = update["run"]
        return self

    def use(self, registry: object, source: object) -> Job:
        assert (registry, source) == ("registry", "source")
        return self


@pytest.mark.parametrize(("checkpoint", "words"), [(None, ""), ("7", " --checkpoint 7")])
def test_the_job_of_a_run_is_trusted_with_the_plugins_of_the_command_line(
    checkpoint: str | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "Job", SimpleNamespace(load_saved=lambda saved, **given: (saved, given)))
    for policy in (PluginPolicy(files=(Path("one.py"),)), None):
        request = Request(checkpoint=checkpoint, overrides=["seed=1"], policy=policy, world_size=3)
        saved, given = cast("Any", request.load_saved(Path("a run")))
        assert (saved.path, saved.trust) == (Path("a run"), f"d9d evaluate 'a run'{words}")
        assert list(saved.files) == ([] if policy is None else [Path("one.py")])
        assert given == {"overrides": ["seed=1"], "policy": policy or PluginPolicy(), "world_size": 3}


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Loads:
    return Loads(monkeypatch)


def found(target: Path | str, **request: Any) -> Subject:
    return find_subject(str(target), Request(**request), NO_REGISTRY)


def run_in(directory: Path) -> Path:
    directory.mkdir(parents=True)
    (directory / "job.yaml").write_text("")
    return directory


def test_the_directory_of_a_run_is_evaluated_where_it_is(loads: Loads, tmp_path: Path) -> None:
    run = run_in(tmp_path / "runs" / "mine")
    one = found(run, checkpoint="12")
    assert loads.loaded == [("saved", run / "job.yaml", "12")]
    assert (one.name, one.run, one.checkpoint, one.note) == (str(run), True, "12", None)
    assert cast("Any", one.job).moved == {"dir": tmp_path / "runs", "name": "mine"}


def test_a_job_file_is_one_of_a_run_if_the_run_recorded_its_plugins(loads: Loads, tmp_path: Path) -> None:
    run = run_in(tmp_path / "mine")
    assert not found(run / "job.yaml").run
    (run / "plugins.json").write_text("{}")
    assert found(run / "job.yaml").run
    (run / "other.yaml").write_text("")
    assert not found(run / "other.yaml").run
    assert [how for how, *_ in loads.loaded] == ["own"] * 3


def test_a_checkpoint_is_a_step_of_its_run(loads: Loads, tmp_path: Path) -> None:
    run = run_in(tmp_path / "mine")
    step = run / "checkpoints" / "step-00000040"
    step.mkdir(parents=True)
    one = found(step)
    assert (one.name, one.run, one.checkpoint) == (str(step), True, "40")
    assert loads.loaded == [("saved", run / "job.yaml", "40")]
    with pytest.raises(
        JobError, match=r"--checkpoint has no effect, as .*step-00000040 is a checkpoint itself; remove the option"
    ):
        found(step, checkpoint="best")
    alone = tmp_path / "step-00000007"
    alone.mkdir()
    with pytest.raises(JobError, match=r"is not in a run, so its data is unknown; give the run"):
        found(alone)
    (run / "job.yaml").unlink()
    with pytest.raises(JobError, match=r"mine has no job.yaml, so it is no run; give the job file or the run's"):
        found(step)


def test_a_job_in_memory_is_named_by_its_run(loads: Loads, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(subject, "Job", Job)
    one = find_subject(cast("Any", Job(tmp_path)), Request(checkpoint="best"), NO_REGISTRY)
    assert (one.name, one.checkpoint) == ("n", "best")
    assert loads.loaded == []


@pytest.mark.parametrize("name", ["s3://bucket/model", "model.safetensors", "model"])
def test_addresses_files_and_directories_of_weights_are_pretrained_models(
    loads: Loads, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_text("")
    target = name if "://" in name else str(tmp_path / name)
    monkeypatch.setattr(subject, "_of_model", lambda *given: given)
    request = Request()
    assert find_subject(target, request, NO_REGISTRY) == cast("Any", (target, request, NO_REGISTRY))
    assert loads.loaded == []


class Trained:
    """Job of a run with strategies, some of which use mesh axes."""

    def __init__(self, processes: int) -> None:
        self.mesh = SimpleNamespace(world_size=processes)
        self.parallel = [SimpleNamespace(selector=name) for name in ("fsdp", "compile", "odd")]
        specs: dict[str, Any] = {"fsdp": StrategySpec, "compile": StrategySpec, "odd": object}
        axes = {"fsdp": frozenset({"dp_shard"}), "compile": frozenset[str]()}

        def find(_kind: str, name: str) -> Any:
            if specs[name] is not StrategySpec:
                return SimpleNamespace(spec=object())
            spec = StrategySpec.__new__(StrategySpec)
            object.__setattr__(spec, "axes", axes[name])
            return SimpleNamespace(spec=spec)

        self.registry = SimpleNamespace(find=find)

    def resolved(self) -> dict[str, Any]:
        parallel = [{"name": "fsdp"}, {"name": "compile", "x": 1}, {"name": "odd"}]
        return {"seed": 1, "mesh": {"dp_shard": 4}, "pipeline": {"name": "1f1b"}, "parallel": parallel}


@pytest.mark.parametrize(
    ("trained", "here", "note"),
    [
        (4, 1, "r was trained in 4 processes; it is evaluated in 1 process"),
        (1, 2, "r was trained in 1 process; it is evaluated in 2 processes"),
    ],
)
def test_another_number_of_processes_drops_the_layout_and_keeps_strategies_without_axes(
    monkeypatch: pytest.MonkeyPatch, trained: int, here: int, note: str
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(subject.Job, "from_values", lambda values, **options: given.append((values, options)) or "new")
    job: Any = Trained(trained)
    assert subject._for_processes("r", job, Request(world_size=here)) == ("new", note)
    values = {"seed": 1, "pipeline": None, "parallel": [{"name": "compile", "x": 1}]}
    assert given == [(values, {"registry": job.registry, "world_size": here})]


@pytest.mark.parametrize(
    ("here", "overrides"),
    [(None, []), (4, []), (2, ["mesh.dp_shard=2"]), (2, ["seed=1", "parallel=[]"]), (2, ["pipeline=null"])],
)
def test_a_layout_is_kept_if_it_fits_or_the_user_gives_one(here: int | None, overrides: list[str]) -> None:
    job: Any = Trained(4)
    assert subject._for_processes("r", job, Request(world_size=here, overrides=overrides)) == (job, None)


def test_a_compared_model_keeps_its_weights_and_gets_the_data_and_layout_of_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ("model", "peft", "run", "loading", "precision", "checkpoint", "seed", "data", "mesh", "evaluation")

    def subject_of(which: str) -> Subject:
        job = SimpleNamespace(
            resolved=lambda: {name: f"{which} {name}" for name in names}, registry=which, source=f"{which} source"
        )
        return Subject(which, cast("Any", job), which == "other", "best")

    given: list[Any] = []

    class Made:
        def use(self, *used: object) -> Any:
            return used

    def from_values(values: dict[str, str], registry: str) -> Made:
        given.append((values, registry))
        return Made()

    monkeypatch.setattr(subject.Job, "from_values", from_values)
    made = same_data(subject_of("other"), subject_of("first"))
    assert (made.name, made.run, made.checkpoint) == ("other", True, "best")
    assert cast("Any", made.job) == ("first", "first source")
    ((values, registry),) = given
    assert registry == "first"
    assert values == {name: f"{'other' if name in names[:7] else 'first'} {name}" for name in names}


def test_a_pretrained_model_is_evaluated_with_the_data_and_layout_of_a_job(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    evaluated: list[Any] = []

    def keep(values: Any, job: Any, files: Any) -> str:
        evaluated.append((values, job, files))
        return "job"

    monkeypatch.setattr(subject, "_evaluated", keep)
    record = {"summary": "x", "config": Ref("a:B"), "build": Ref("a:B"), "hugging_face": Ref("a:B")}
    types: set[str] = set()
    like: Any = SimpleNamespace(
        model=SimpleNamespace(selector="llama"),
        registry=SimpleNamespace(
            find=lambda *_: SimpleNamespace(spec=ModelSpec(name="llama", model_types=types, **record))  # type: ignore[arg-type]
        ),
        resolved=lambda: {"model": "old", "peft": "lora", "loading": {"weights": False, "x": 1}, "data": "d"},
    )
    loaded: list[Path] = []
    monkeypatch.setattr(subject.Request, "load", lambda _self, path: loaded.append(path) or like)
    (tmp_path / "config.json").write_text(json.dumps({}))
    file = tmp_path / "a.jsonl"
    for given in (like, tmp_path / "job.yaml"):
        one = find_subject(str(tmp_path), Request(like=given, files=[file]), NO_REGISTRY)
        assert (one.name, one.job, one.run) == (str(tmp_path), "job", False)
    expected = {
        "model": {"name": "llama", "pretrained": str(tmp_path)}, "peft": None, "loading": {"weights": True, "x": 1},
        "data": "d",
    }  # fmt: skip
    assert evaluated == [(expected, like, [file])] * 2
    assert loaded == [tmp_path / "job.yaml"]
    types.add("llama")  # so the weights may be another model's, which is found by its type
    find_subject(str(tmp_path), Request(like=like, files=[file]), NO_REGISTRY)
    assert evaluated[-1][0] == expected | {"model": {"pretrained": str(tmp_path)}}


def test_files_of_samples_need_different_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(subject, "dataset_of", lambda path, _like: str(path))
    (tmp_path / "config.json").write_text("{}")
    files = [Path("a/x"), Path("b/x.y")]
    for find in (
        lambda: subject._evaluated({"data": "d"}, cast("Any", SimpleNamespace(evaluation=None)), files),
        lambda: find_subject(str(tmp_path), Request(files=files), NO_REGISTRY),
    ):
        with pytest.raises(JobError, match="--data: two files are named 'x' without their suffixes; rename one"):
            find()
