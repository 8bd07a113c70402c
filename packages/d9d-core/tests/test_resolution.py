"""Resolution of a job, and the build of its components."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Literal

import d9d_testing.toy.plugin as toy
import pytest
from d9d_core.components.instantiate import inner_builder, instantiate
from d9d_core.errors import BuildError, JobError
from d9d_core.job import JobFile
from d9d_core.job_file import resolve as resolve_module
from d9d_core.job_file.resolve import observations_read, resolve, select, tensors_given
from d9d_core.plugin import (
    ConfiguredSpec,
    DatasetSpec,
    MetricSpec,
    Ref,
    TaskSpec,
    hookimpl,
)
from d9d_core.registry.capabilities import Circumstances
from d9d_core.registry.registry import Registry
from d9d_testing.toy.config import ToyDataConfig, ToyMetricConfig

JOB = {"steps": 3, "model": "toy_model", "data": "toy_data", "task": "toy_task", "optimizer": "toy_optimizer"}


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
        "place: thing 'x': the sizes in its config need a tensor larger than any memory "
        "(Storage size calculation overflowed with sizes=[9]); lower them"
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
    with pytest.raises(BuildError, match="^place: the build of 'x' passed a config of 'other' that is not nested"):
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


def test_datasets_of_an_evaluation_are_chosen_under_their_field(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve_module, "choose", lambda *given: given)
    registry: Any = "registry"
    evaluation: Any = SimpleNamespace(datasets={"": "config", "hard": "other"})
    assert resolve_module._evaluated(registry, evaluation) == [
        (("registry", "dataset", "evaluation.data", "config"), "config"),
        (("registry", "dataset", "evaluation.sets.hard", "other"), "other"),
    ]
    assert resolve_module._evaluated(registry, None) == []
