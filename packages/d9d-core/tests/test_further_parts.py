"""Further small parts alone: lengths and shapes, subscriptions, saved jobs, resolution, and lists of plugins."""

from __future__ import annotations

import json
import logging
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import d9d_testing.toy.plugin as toy
import pytest
import torch
import torch.distributed.tensor
from d9d_core import tensors as tensors_module
from d9d_core.cli import app as app_module
from d9d_core.cli import main as main_module
from d9d_core.cli.app import app
from d9d_core.cli.plugins import check_plugins, show_records
from d9d_core.components.instantiate import inner_builder, instantiate
from d9d_core.config import LoadsCode, PathOrAddress, PathText, Section, closest, dotted, speakable
from d9d_core.data import SampleLengths, packs_documents, sample_lengths
from d9d_core.errors import BuildError, JobError, PluginError, TrainingError, interrupt_behind
from d9d_core.job import JobFile
from d9d_core.job_file import reading
from d9d_core.job_file.evaluation import Evaluation
from d9d_core.job_file.job import Checkpoint, Mesh, Precision, Run
from d9d_core.job_file.reading import read_yaml, write_yaml
from d9d_core.job_file.resolve import observations_read, resolve, select, tensors_given
from d9d_core.job_file.saved_job import SavedJob, code_mark
from d9d_core.job_file.schema import job_schema
from d9d_core.job_file.sections.plugins import Plugins
from d9d_core.job_file.sections.profiling import Profiling
from d9d_core.model import Stage
from d9d_core.plugin import (
    ConfiguredSpec,
    DatasetSpec,
    KernelSpec,
    MetricSpec,
    Ref,
    StrategySpec,
    TaskSpec,
    hookimpl,
)
from d9d_core.program.index import ProgramIndex
from d9d_core.program.placement import Pipeline
from d9d_core.registry.capabilities import Circumstances
from d9d_core.registry.entries import shown
from d9d_core.registry.registry import Registry
from d9d_core.schedule import Backward, Forward, Reduce
from d9d_core.strategy import StepShape
from d9d_core.subscriber import Subscribes, subscribe, subscriptions_of
from d9d_core.tensors import beside, full
from d9d_core.tracker import Histogram, flatten
from d9d_testing.toy.config import ToyDataConfig, ToyMetricConfig
from pydantic import BaseModel, TypeAdapter, ValidationError
from typer.testing import CliRunner

JOB = {"steps": 3, "model": "toy_model", "data": "toy_data", "task": "toy_task", "optimizer": "toy_optimizer"}


def test_lengths_are_fixed_if_the_divisor_is_the_bound() -> None:
    assert [SampleLengths(4, most).fixed for most in (4, 8, None)] == [4, None, None]
    stated = SimpleNamespace(sample_lengths=SampleLengths(4))
    assert sample_lengths(stated) == SampleLengths(4)
    assert sample_lengths(object()) is None


@pytest.mark.parametrize(
    ("answers", "found"),
    [
        ([], False), ([False, False], False), ([False, True], True), ([None, True], True), ([False, None], None),
        (["silent", False], None), (["silent", True], True),
    ],
)  # fmt: skip
def test_documents_are_packed_if_any_dataset_says_so(answers: list[Any], found: bool | None) -> None:
    datasets = [object() if answer == "silent" else SimpleNamespace(packs_documents=answer) for answer in answers]
    assert packs_documents(*datasets) is found


def test_stages_know_their_place() -> None:
    places = [(stage.is_first, stage.is_last) for stage in (Stage(), Stage(0, 3), Stage(1, 3), Stage(2, 3))]
    assert places == [(True, True), (True, False), (False, False), (False, True)]


def test_passes_of_a_step_are_counted() -> None:
    shape = StepShape(("forward", "input_backward", "forward"), 2, 3, 4)
    assert (shape.forwards, shape.backwards, shape.split_backward) == (2, 1, True)
    assert not StepShape(("forward", "backward"), 2, 3, 4).split_backward
    assert (shape.bytes_of(5), shape.bytes_of(0.25), shape.bytes_of(5, 1)) == (120, 6, 30)
    assert StepShape((), 2, None, 4).bytes_of(5) is None


class Base(Subscribes):
    @subscribe(int)
    def first(self, event: Any) -> None: ...


class Watches(Base):
    @subscribe(str, float)
    def second(self, event: Any) -> None: ...

    @subscribe(bytes)
    def first(self, event: Any) -> None: ...

    def other(self) -> None: ...


def test_handlers_of_base_classes_come_first_and_of_each_event_once() -> None:
    found = [(event, handler.__name__) for event, handler in subscriptions_of(Watches())]
    assert found == [(bytes, "first"), (str, "second"), (float, "second")]

    @subscribe(int)
    @subscribe(str)
    def show(event: Any) -> None: ...

    assert list(subscriptions_of(show)) == [(str, show), (int, show)]
    for observer in (print, 3):
        with pytest.raises(TypeError, match="is not an observer; give it subscriptions"):
            list(subscriptions_of(observer))


def test_nested_values_get_names_with_slashes() -> None:
    assert flatten({"a": {"b": 1, "c": {}}, "d": [1, 2], "e": [{"x": 1}, {"y": 2}], "f": []}) == {
        "a/b": 1, "a/c": {}, "d": [1, 2], "e/0/x": 1, "e/1/y": 2, "f": [],
    }  # fmt: skip
    Histogram(torch.ones(1), 0.0, 1.0)
    for counts in (torch.ones(0), torch.ones(1, 1), torch.ones(())):
        with pytest.raises(ValueError, match="counts of a histogram have shape"):
            Histogram(counts, 0.0, 1.0)


# --- sections of a job ------------------------------------------------------------------------------------------------


def problem(section: type[BaseModel], **fields: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        section.model_validate(fields)
    return str(caught.value.errors()[0]["msg"])


def test_a_profiled_cycle_has_room_for_its_steps() -> None:
    Profiling(every=4, warmup=1, active=3)
    assert problem(Profiling, every=4, warmup=2, active=3) == (
        "Value error, warmup 2 and active 3 are 5 steps, more than the 4 of a cycle; raise every or lower the others"
    )


def test_checkpoints_are_kept_only_if_some_are_removed() -> None:
    Checkpoint(every=2, keep_every=4)
    Checkpoint(keep=None)
    assert "so keep_every has no effect" in problem(Checkpoint, keep=None, every=2, keep_every=4)
    assert "so best has no effect" in problem(Checkpoint, keep=None, best={})
    for every in (None, 3):
        assert f"keep_every 4 must be a multiple of every, which is {every}" in problem(
            Checkpoint, every=every, keep_every=4
        )
    assert Checkpoint().location(Path("run")) == Path("run/checkpoints")
    assert Checkpoint(dir="there").location(Path("run")) == Path("there")
    assert Checkpoint(dir="memory://there").location(Path("run")) == "memory://there"


def test_other_sections_refuse_values_without_effect() -> None:
    assert "autocast is for float32 parameters" in problem(Precision, parameters="bfloat16", autocast="bfloat16")
    assert problem(Run, tags=["a", "b", "a"]) == "Value error, duplicate tag 'a'; remove one"
    assert str(Mesh(tp=2, ep=2)) == "tp=2"
    assert str(Mesh(ep=1)) == "one process"
    assert "missing; add 'data:' under 'evaluation'" in problem(Evaluation, every=2)
    data = ToyDataConfig()
    assert "'sets' already names a, b; move 'data' into 'sets'" in problem(
        Evaluation, every=2, sets={"a": data, "b": data}, data=data
    )
    metric = ToyMetricConfig()
    assert "metrics[1] is the same as metrics[0]; remove one" in problem(
        Evaluation, every=2, data=data, metrics=[metric, metric]
    )
    assert Evaluation(every=2, data=data).datasets == {"": data}
    assert list(Evaluation(every=2, sets={"b": data, "a": data}).datasets) == ["b", "a"]


def test_lists_of_a_job_have_no_part_twice_and_trackers_one_of_each_name(tmp_path: Path) -> None:
    registry = Registry.of(toy)
    twice = {"name": "toy_tracker", "fails_in": "write"}
    with pytest.raises(JobError, match=r"trackers\[1\] is 'toy_tracker' like trackers\[0\]: both would write"):
        JobFile.from_values({**JOB, "trackers": ["toy_tracker", twice]}, registry=registry)
    with pytest.raises(JobError, match=r"metrics\[1\] is the same as metrics\[0\]; remove one"):
        JobFile.from_values({**JOB, "metrics": ["toy_metric", "toy_metric"]}, registry=registry)
    made = JobFile.from_values({**JOB, "batch": {"size": 12, "microbatch": 4}}, registry=registry)
    assert (made.microbatch_size, made.microbatches) == (4, 3)
    whole = JobFile.from_values({**JOB, "batch": {"size": 12}}, registry=registry)
    assert (whole.microbatch_size, whole.microbatches) == (12, 1)


class Values(Section):
    path: Path = Path()
    number: int = 0
    share: float = 0.0
    free: dict[str, Any] = {}
    many: list[Path] = []


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"number": True}, "input should be a number"),
        ({"share": False}, "input should be a number"),
        ({"number": 2**63}, f"a whole number has at most 64 bits, up to {2**63 - 1}"),
        ({"number": -(2**63)}, f"a whole number has at most 64 bits, up to {2**63 - 1}"),
        ({"free": {"x": float("inf")}}, "input should be a finite number"),
        ({"path": "s3://there"}, "address"),
        ({"many": ["a", "s3://there"]}, "address"),
    ],
)
def test_values_that_no_part_of_d9d_could_use_are_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Values.model_validate(values)
    (line,) = caught.value.errors()
    assert said in line["msg"]


def test_values_at_the_limits_are_accepted() -> None:
    found = Values.model_validate({"number": 2**63 - 1, "free": {"x": [1.5, True]}, "many": ["a", "b"]})
    assert (found.number, found.free, found.many) == (2**63 - 1, {"x": [1.5, True]}, [Path("a"), Path("b")])


def test_texts_of_paths_and_addresses() -> None:
    path, address = TypeAdapter(PathText), TypeAdapter(PathOrAddress)
    assert (path.validate_python("a/b"), address.validate_python("a/b")) == ("a/b", "a/b")
    assert address.validate_python("memory://x") == "memory://x"
    for text in ("zip://a::memory://x", "simplecache::memory://x", "unheard::memory://x"):
        assert address.validate_python(text) == text
    with pytest.raises(ValidationError):
        path.validate_python("memory://x")
    with pytest.raises(ValidationError, match="no driver for addresses of 'memry://'; did you mean 'memory://'"):
        address.validate_python("memry://x")
    assert dotted(("a", 0, "b", "c")) == "a[0].b.c"
    assert (closest("trian", ["train", "check"]), closest("x", ["train"])) == ("train", None)
    assert speakable({"a": [float("inf"), 1.0], "b": float("nan")}) == {"a": ["inf", 1.0], "b": "nan"}


def test_as_many_values_as_allowed_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reading.MAX_VALUES == 100_000
    monkeypatch.setattr(reading, "MAX_VALUES", 4)
    assert read_yaml("[1, 2, 3]", "job")[0] == [1, 2, 3]
    with pytest.raises(JobError, match="more than 4 values"):
        read_yaml("[1, 2, 3, 4]", "job")


def test_texts_like_numbers_are_quoted() -> None:
    values = {"a": "3e-4", "b": "yes", "c": "1_0", "d": "text", "e": 3e-4}
    assert read_yaml(write_yaml(values), "job")[0] == values
    assert "d: text\n" in write_yaml(values)


# --- saved jobs -------------------------------------------------------------------------------------------------------


def saved(tmp_path: Path, text: str, *files: Path) -> SavedJob:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    return SavedJob(path, "d9d x --like job.yaml", files)


def test_a_saved_job_is_read_without_parts_that_only_a_run_needs(tmp_path: Path) -> None:
    text = "seed: 3\ntrackers: [s3://x]\nsubscribers: [a]\nlr_schedule: b\nprofiling: {}\nrun: {description: 'a://b'}\n"
    document = saved(tmp_path, text).read(["seed=4", "model.pretrained=s3://given"])
    assert document.values == {
        "seed": 4, "run": {"description": "a://b"}, "model": {"pretrained": "s3://given"},
    }  # fmt: skip


def test_a_saved_job_that_would_run_code_or_open_addresses_is_refused(tmp_path: Path) -> None:
    text = f"plugins:\n  files: [mine.py, other.py]\nmodel:\n  pretrained: s3://{'x' * 80}\ndata: [a, {{b: c://d}}]\n"
    job = saved(tmp_path, text, tmp_path / "other.py")
    with pytest.raises(JobError) as caught:
        job.read()
    path = job.path
    cut = repr("s3://" + "x" * 80)[:57] + "..."
    assert str(caught.value).splitlines() == [
        f"{path}:2: plugins.files[0] names a plugin file, 'mine.py'",
        f"{path}:4: model.pretrained is an address, {cut}",
        f"{path}:5: data[1].b is an address, 'c://d'",
        "a job file found in a directory runs no code and opens no address; "
        f"read {path}, and if you trust it, name it: d9d x --like job.yaml",
    ]
    with pytest.raises(JobError, match=r"plugins\[0\] names a plugin file, 'mine.py'"):
        saved(tmp_path, "plugins: [mine.py]").read()
    with pytest.raises(JobError, match="plugins.* names a plugin file, 'mine.py'"):
        saved(tmp_path, "plugins: mine.py").read()


class Imports(Section):
    build: Annotated[str, LoadsCode(lambda text: ":" in text)] = ""
    inner: list[Annotated[str, LoadsCode()]] = []
    more: dict[str, Annotated[str, LoadsCode()]] = {}
    plain: str = "a:b"


def test_fields_that_import_code_are_refused_unless_the_command_line_set_them(tmp_path: Path) -> None:
    job = saved(tmp_path, "x: 1\n")
    found: Any = Imports(build="a:b", inner=["c"], more={"k": "d"})
    with pytest.raises(JobError) as caught:
        job.check(found, job.read())
    assert [line.partition(": ")[2] for line in str(caught.value).splitlines()[:3]] == [
        "build names code to import, 'a:b'",
        "inner[0] names code to import, 'c'",
        "more.k names code to import, 'd'",
    ]
    harmless: Any = Imports(build="nothing")
    job.check(harmless, job.read())
    job.check(found, job.read(["build=a:b", "inner=[c]", "more={k: d}"]))
    assert code_mark((int, list[str])) is None


# --- resolution -------------------------------------------------------------------------------------------------------


class Here(Ref):
    def load(self) -> Any:
        return ToyDataConfig


def dataset(name: str, gives: Any) -> DatasetSpec:
    ref = Here("my:config")
    return DatasetSpec(name=name, summary="x", config=ref, build=ref, gives=gives)


@hookimpl
def d9d_datasets() -> list[DatasetSpec]:
    return [dataset("one", {"x": 2, "y": 2, "mask": 1}), dataset("wide", {"x": 3, "y": 2, "mask": 1})]


PLUGIN = SimpleNamespace(__name__="acme", d9d_datasets=d9d_datasets)


def chosen(spec: Any, where: str = "data", inner: Any = ()) -> Any:
    return SimpleNamespace(spec=spec, entry=f"'{spec.name}'", where=where, inner=inner)


def test_tensors_of_a_dataset_are_its_own_or_common_to_its_inner_ones() -> None:
    plain: Any = object()
    assert tensors_given(chosen(dataset("a", {"x": 2})), plain) == {"x": 2}
    assert tensors_given(chosen(dataset("a", None)), plain) is None
    choosing: Any = SimpleNamespace(gives={"z": 1})
    assert tensors_given(chosen(dataset("a", {"x": 2})), choosing) == {"z": 1}
    parts = [(chosen(dataset("b", {"x": 2, "y": 2})), plain), (chosen(dataset("c", {"x": 2, "y": 3})), plain)]
    assert tensors_given(chosen(dataset("a", "inner"), inner=parts), plain) == {"x": 2}
    unknown = [*parts, (chosen(dataset("d", None)), plain)]
    assert tensors_given(chosen(dataset("a", "inner"), inner=unknown), plain) is None
    assert tensors_given(chosen(dataset("a", "inner")), plain) is None


def resolved(registry: Registry, **sections: Any) -> Any:
    job = JobFile.from_values({**JOB, **sections}, registry=registry)
    return resolve(job, select(job, registry), registry, Circumstances())


def test_a_dataset_that_lacks_tensors_of_the_task_names_those_that_have_them() -> None:
    with pytest.raises(JobError) as caught:
        resolved(Registry.of(toy), data="toy_tokens")
    text = "data: task 'toy_task' (d9d_testing.toy.plugin) reads mask, x, y, which dataset 'toy_tokens' "
    assert str(caught.value) == f"{text}(d9d_testing.toy.plugin) does not give; 'toy_data' does"
    with pytest.raises(JobError, match="does not give; 'one' and 'toy_data' do$"):
        resolved(Registry.of(toy, PLUGIN), data="toy_tokens")


def test_metrics_read_observations_of_their_task_and_its_inner_metrics() -> None:
    ref = Here("my:config")

    def metric(name: str, *reads: str) -> MetricSpec:
        return MetricSpec(name=name, summary="x", config=ref, build=ref, reads=set(reads))

    config = ToyMetricConfig()
    inner = chosen(metric("b", "y"))
    assert observations_read(chosen(metric("a", "x"), inner=[(inner, config)]), config) == {"x", "y"}
    choosing: Any = type("C", (ToyMetricConfig,), {"reads": property(lambda _self: {"z"})})()
    assert observations_read(chosen(metric("a", "x")), choosing) == {"z"}


def test_a_metric_that_reads_what_the_task_does_not_observe_is_refused() -> None:
    @hookimpl
    def d9d_tasks() -> list[TaskSpec]:
        ref = Here("my:task")
        return [TaskSpec(name="quiet", summary="x", config=ref, build=ref, observes={"absolut"}, on_demand={"more"})]

    from d9d_testing.toy.config import ToyTaskConfig

    class Quiet(ToyTaskConfig):
        name: Literal["quiet"] = "quiet"  # type: ignore[assignment]

    def load(self: Ref) -> Any:
        return Quiet

    monkey = pytest.MonkeyPatch()
    monkey.setattr(Here, "load", load)
    try:
        registry = Registry.of(toy, SimpleNamespace(__name__="acme", d9d_tasks=d9d_tasks))
        with pytest.raises(JobError) as caught:
            resolved(registry, task="quiet", metrics=["toy_metric"])
    finally:
        monkey.undo()
    assert str(caught.value) == (
        "metrics[0]: metric 'toy_metric' (d9d_testing.toy.plugin) reads absolute, which task 'quiet' (acme) does not "
        "observe; did you mean 'absolut'? the task observes: absolut, more"
    )


def test_only_adapters_of_a_model_with_a_layout_are_exported() -> None:
    with pytest.raises(JobError, match="^export: model 'toy_linears' .* has no Hugging Face layout; set 'export: fals"):
        resolved(Registry.of(toy), model="toy_linears", export="adapter")
    resolved(Registry.of(toy), model="toy_linears", export=False)


# --- components -------------------------------------------------------------------------------------------------------


class Build(Ref):
    def load(self) -> Any:
        return BUILDS[self.target.partition(":")[2]]


def too_large(_config: Any) -> Any:
    raise RuntimeError("Storage size calculation overflowed with sizes=[9]\nand more")


def fails(_config: Any) -> Any:
    raise ValueError("no")


def inside(_config: Any) -> Any:
    return len(3)  # type: ignore[arg-type]


BUILDS = {
    "large": too_large,
    "fails": fails,
    "inside": inside,
    "none": lambda _config: None,
    "makes": lambda c, *a: (c, a),
}


def made(build: str, *arguments: Any, composite: bool = False, inner: Any = ()) -> Any:
    ref = Build(f"my:{build}")
    spec = ConfiguredSpec(name="x", summary="x", config=ref, build=ref, composite=composite)
    kind = SimpleNamespace(name="thing")

    class Entry(SimpleNamespace):
        def __str__(self) -> str:
            return "'x'"

    of: Any = SimpleNamespace(where="place", spec=spec, entry=Entry(kind=kind), inner=inner)
    config: Any = "config"
    return instantiate(of, config, *arguments)


def test_a_component_that_cannot_be_built_says_why() -> None:
    with pytest.raises(BuildError) as caught:
        made("large")
    assert str(caught.value) == (
        "place: thing 'x': its sizes make a tensor larger than any memory (Storage size calculation overflowed with "
        "sizes=[9]); correct them"
    )
    with pytest.raises(BuildError) as caught:
        made("fails", 1, "a")
    assert str(caught.value).startswith("place: thing 'x': my:fails cannot be called with (config, int, str): fails()")
    with pytest.raises(TypeError, match="has no len"):
        made("inside")
    with pytest.raises(ValueError, match="^no$"):
        made("fails")
    with pytest.raises(BuildError, match="^place: thing 'x': build returned nothing; return the component"):
        made("none")
    BUILDS.pop("absent", None)
    with pytest.raises(KeyError):
        made("absent")


def test_a_composite_component_gets_a_builder_of_its_inner_ones() -> None:
    config, (first, build) = made("makes", 1, composite=True)
    assert (config, first) == ("config", 1)
    assert callable(build)
    other: Any = SimpleNamespace(selector="other")
    with pytest.raises(BuildError, match="^place: 'x' builds 'other', which is not in its config$"):
        build(other)
    assert made("makes", 1) == ("config", (1,))


def test_equal_configs_inside_a_component_are_told_apart_by_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("d9d_core.components.instantiate.instantiate", lambda chosen, *given: (chosen, *given))
    one, same = ToyDataConfig(), ToyDataConfig()
    of: Any = SimpleNamespace(inner=[("first", one), ("second", same)], where="place", entry="'x'")
    build = inner_builder(of)
    assert build(same, 3) == ("second", same, 3)
    assert build(ToyDataConfig(), 3)[0] == "first"
    with pytest.raises(BuildError):
        build(ToyDataConfig(features=99))


# --- tensors and programs ---------------------------------------------------------------------------------------------


class Sharded:
    """Stand-in of a DTensor on a mesh."""

    def __init__(self, mesh: str) -> None:
        self.device_mesh = mesh


def test_tensors_of_other_meshes_are_gathered_beside_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    plain: Any = torch.ones(1)
    assert beside(plain, plain) == (plain,)
    assert full(plain) is plain
    monkeypatch.setattr(tensors_module, "is_dtensor", lambda tensor: isinstance(tensor, Sharded))
    monkeypatch.setattr(tensors_module, "full", lambda tensor: ("full", tensor))
    own: Any = Sharded("a")
    same, other = Sharded("a"), Sharded("b")
    several: list[Any] = [same, same]
    assert beside(own, *several) == (same, same)
    mixed: list[Any] = [other, plain]
    assert beside(plain, *mixed) == (("full", other), ("full", plain))


def test_microbatches_of_programs_are_counted_from_their_largest_number() -> None:
    index = ProgramIndex.of([(Forward(0, 0), Forward(0, 2), Forward(0, 1)), (Backward(1, 1),)])
    assert (index.microbatches, index.stages, index.hosts, index.problems) == (3, 2, [0, 1], [])


def test_a_pipeline_works_with_the_least_microbatches_that_its_schedule_takes() -> None:
    def schedule(ranks: int, microbatches: int) -> list[Any]:
        if microbatches < 3:
            raise BuildError("too few")
        assert ranks == 1
        each = [action for count in range(microbatches) for action in (Forward(0, count), Backward(0, count))]
        return [(*each, Reduce(0))]

    pipeline = Pipeline(schedule)
    assert pipeline.least_microbatches(8) == 3
    assert pipeline.least_microbatches(2) == 2


# --- errors, plugins and commands -------------------------------------------------------------------------------------


def test_interrupts_behind_other_errors_are_recognised() -> None:
    error = RuntimeError("no")
    assert not interrupt_behind(error)
    error.__cause__ = KeyboardInterrupt()
    assert interrupt_behind(error)
    error.__cause__ = ValueError()
    assert not interrupt_behind(error)
    broken = type("SchemaError", (Exception,), {})
    assert interrupt_behind(broken("KeyboardInterrupt"))
    assert not interrupt_behind(broken("other"))


def test_values_of_plugins_are_shown_up_to_500_characters() -> None:
    assert shown("x" * 498) == repr("x" * 498)
    assert shown("x" * 499) == f"'{'x' * 499}... (501 characters)"


def test_the_schema_of_job_files_has_its_title_and_version() -> None:
    schema = job_schema(Registry.of(toy))
    assert schema["title"] == "d9d job file"
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["properties"]["plugins"]["anyOf"][1] == {
        "type": "array", "items": {"type": "string"}, "description": "Single-file plugins.",
    }  # fmt: skip


def test_records_of_plugins_are_listed_checked_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    registry = Registry.of(toy)
    show_records(registry, "toy_strategy", as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "strategy toy_strategy (d9d_testing.toy.plugin): Halves the outputs of blocks."
    assert lines[1] == "  requires: model:blocks"
    rows = [line.split() for line in lines[2:]]
    assert rows[0] == ["field", "accepts", "default", "meaning"]
    assert ["blocks", "whole", "number", "1", "Number", "of", "blocks;", "zero", "matches", "nothing."] in rows
    show_records(registry, "toy_strategy", as_json=True)
    (detail,) = json.loads(capsys.readouterr().out)
    config = detail.pop("config")
    assert config["properties"]["blocks"]["default"] == 1
    assert detail == {
        "kind": "strategy",
        "name": "toy_strategy",
        "distribution": "d9d_testing.toy.plugin",
        "version": detail["version"],
        "summary": "Halves the outputs of blocks.",
        "requires": ["model:blocks"],
        "provides": [],
        "conflicts": [],
        "references": detail["references"],
    }
    show_records(registry, "d9d_testing.toy.plugin", as_json=False)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["extension", "point", "name", "distribution", "summary"]
    assert ["model", "toy_model", "d9d_testing.toy.plugin"] in [row[:3] for row in rows]
    with pytest.raises(PluginError, match="^no record is called 'x'; names: "):
        show_records(registry, "x", as_json=False)
    assert check_plugins(registry, "d9d_testing.toy.plugin", as_json=True)
    number = len([entry for entry in registry.entries() if entry.origin.is_called("d9d_testing.toy.plugin")])
    assert capsys.readouterr().out == f'{{\n "records": {number},\n "problems": []\n}}\n'
    with pytest.raises(PluginError, match="^no plugin 'x'; loaded: "):
        check_plugins(registry, "x", as_json=True)


def test_clashes_are_reported_for_the_asked_distributions_only() -> None:
    def plugin(name: str) -> Any:
        @hookimpl
        def d9d_strategies() -> list[StrategySpec]:
            ref = Ref("nowhere:x")
            return [StrategySpec(name="same", summary="x", config=ref, build=ref, anchor="data")]

        return SimpleNamespace(__name__=name, d9d_strategies=d9d_strategies)

    registry = Registry.of(plugin("acme"), plugin("other"))
    assert len(registry.conflicts()) == 1
    assert len(registry.conflicts({"other"})) == 1
    assert registry.conflicts({"third"}) == []


def test_a_kernel_is_of_an_op_and_deterministic_unless_it_says_otherwise() -> None:
    ref = Ref("nowhere:x")
    kernel = KernelSpec(op="rope", name="fast", summary="x", supports=ref, build=ref)
    assert kernel.deterministic
    assert kernel.operators == ()


@pytest.mark.thorough
def test_commands_without_words_print_their_help() -> None:
    for words in ([], ["plugins"]):
        result = CliRunner().invoke(app, words)
        assert "Usage: " in result.output
        assert "--help" in result.output


def test_doctor_examines_the_plugins_and_names_of_own_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    answers = [True, False]
    monkeypatch.setattr("d9d_core.cli.health.examine", lambda *given: asked.append(given) or answers[len(asked) - 1])
    monkeypatch.setattr(app_module, "discover_plugins", lambda *given: given)
    assert [CliRunner().invoke(app, ["doctor", "--no-plugins"]).exit_code for _ in range(2)] == [0, 1]
    assert asked[0] == (([], True), {"check", "schema", "doctor", "plugins"})


@pytest.mark.parametrize(
    ("ends", "status"), [(None, 0), (SystemExit(3), 3), (SystemExit(None), 0), (SystemExit("no"), 1), (ValueError(), 1)]
)
def test_a_command_ends_in_time_with_its_status(
    monkeypatch: pytest.MonkeyPatch, ends: BaseException | None, status: int
) -> None:
    ended: list[int] = []

    def runs() -> None:
        if ends is not None:
            raise ends

    monkeypatch.setattr(main_module, "_main", runs)
    monkeypatch.setattr(main_module, "end_in_time", ended.append)
    monkeypatch.setattr(main_module, "make_tracebacks_visible", lambda: None)
    if ends is None:
        main_module.main()
    else:
        with pytest.raises(type(ends)):
            main_module.main()
    assert ended == [status]


def test_after_an_interrupt_no_further_one_is_raised_at_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    masked: list[Any] = []
    monkeypatch.setattr(signal, "pthread_sigmask", lambda *given: masked.append(given))

    def run(error: BaseException | None) -> None:
        if error is not None:
            raise error

    for error, status, blocked in (
        (KeyboardInterrupt(), 130, [(signal.SIG_BLOCK, {signal.SIGINT})]),
        (SystemExit(130), 130, [(signal.SIG_BLOCK, {signal.SIGINT})]),
        (SystemExit(2), 2, []),
    ):
        masked.clear()
        monkeypatch.setattr(app_module, "run", lambda error=error: run(error))
        with pytest.raises(SystemExit) as end:
            main_module._main()
        assert (end.value.code, masked) == (status, blocked)
    assert capsys.readouterr().err == "interrupted\n"
    monkeypatch.setattr(app_module, "run", lambda: run(TrainingError("x")))
    with pytest.raises(TrainingError):
        main_module._main()


def test_the_level_of_torchs_log_comes_back_after_a_gather() -> None:
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    before = logger.level
    logger.setLevel(logging.INFO)
    try:
        with tensors_module._without_gather_warning():
            assert logger.level == logging.ERROR
        assert logger.level == logging.INFO
    finally:
        logger.setLevel(before)


def test_names_of_distributions_in_a_job_are_read_like_packaging_tools_read_them() -> None:
    policy = Plugins(allow=["Acme_Moe"], block=["Other.One"], require=["Acme_Moe"], autoload=False).policy()
    assert policy.allow is not None
    assert "acme-moe" in policy.allow
    assert "other-one" in policy.block
    assert ("acme-moe" in policy.require, policy.autoload) == (True, False)
    assert Plugins().policy().allow is None
    assert Plugins().policy().autoload
