"""Components inside components."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import d9d_testing.toy.plugin as toy
import pytest
from d9d_core.config import PluginConfig, Section
from d9d_core.data import DataContext
from d9d_core.errors import BuildError, JobError
from d9d_core.job import JobFile
from d9d_core.job_file.open_union import Named
from d9d_core.job_file.schema import job_schema
from d9d_core.plugin import DatasetSpec, Ref, hookimpl
from d9d_core.registry.registry import Registry
from d9d_testing.toy.config import ToyDataConfig
from d9d_testing.toy.data import ToyStream

VALUES = {"steps": 3, "model": "toy_model", "task": "toy_task", "optimizer": "toy_optimizer"}
CONTEXT = DataContext(seed=0, batch_size=2, microbatch_size=2, cache_dir=Path())


class Member(Section):
    data: Annotated[PluginConfig, Named("dataset")]


class FirstOfConfig(PluginConfig):
    name: Literal["first_of"] = "first_of"
    members: list[Member] = []
    also: Annotated[PluginConfig, Named("dataset")] | None = None
    unnamed: ToyDataConfig = ToyDataConfig()


def first_of(config: FirstOfConfig, context: DataContext, build_inner: Any) -> Any:
    return build_inner(config.members[0].data if config.members else config.unnamed, context)


class Here(Ref):
    def load(self) -> Any:
        return FirstOfConfig if self.target == "my:config" else first_of


@hookimpl
def d9d_datasets() -> list[DatasetSpec]:
    record = {"summary": "x", "config": Here("my:config"), "build": Here("my:build")}
    return [DatasetSpec(name="first_of", **record, composite=True, requires={"mesh:dp_shard"})]  # type: ignore[arg-type]


REGISTRY = Registry.of(toy, SimpleNamespace(__name__="acme", d9d_datasets=d9d_datasets))


def job(**fields: Any) -> JobFile:
    return JobFile.from_values({**VALUES, "data": {"name": "first_of", **fields}}, registry=REGISTRY)


def test_a_component_builds_those_inside_of_it() -> None:
    nested = job(members=[{"data": {"name": "first_of", "members": [{"data": {"name": "toy_data", "features": 7}}]}}])
    stream = nested.open_data(CONTEXT)
    assert isinstance(stream, ToyStream)
    assert stream.facts == {"features": 7}
    assert JobFile.from_values(nested.resolved(), registry=REGISTRY) == nested


def test_requirements_of_inner_components_count_at_their_place() -> None:
    with pytest.raises(JobError) as caught:
        job(members=[{"data": "toy_data"}], also={"name": "first_of"}).check()
    assert [line.split(": ")[0] for line in str(caught.value).splitlines()] == ["data", "data.also"]


def test_a_mistake_in_an_inner_config_is_found_at_its_place() -> None:
    with pytest.raises(JobError, match=r"data\.members\[1\]\.data\.featurs: not a field of 'toy_data'.*'features'"):
        job(members=[{"data": "toy_data"}, {"data": {"name": "toy_data", "featurs": 1}}])
    with pytest.raises(JobError, match=r"data\.members\[0\]\.data: unknown dataset 'toy_dta'; did you mean 'toy_data'"):
        job(members=[{"data": "toy_dta"}])


def test_only_what_the_config_names_can_be_built() -> None:
    with pytest.raises(BuildError, match="passed a config of 'toy_data' that is not nested in the component's own"):
        job().open_data(CONTEXT)


def test_the_schema_holds_the_choices_inside_too() -> None:
    definitions = job_schema(REGISTRY)["$defs"]
    own = next(value for key, value in definitions.items() if key.endswith(":first_of"))
    member = next(value for key, value in definitions.items() if key.endswith(":first_of.Member"))
    assert {"$ref": "#/$defs/dataset:d9d_testing.toy.plugin:toy_data"} in member["properties"]["data"]["anyOf"][1][
        "anyOf"
    ]
    assert own["properties"]["members"]["items"]["$ref"].endswith(":first_of.Member")
