"""Balancing in a job file: bare names, and mistakes described at their places."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import d9d_testing.toy.plugin as toy
import pytest
from d9d_core.config import ModelConfig
from d9d_core.errors import JobError
from d9d_core.job_file.schema import job_schema
from d9d_core.plugin import ModelSpec, Ref, hookimpl
from d9d_core.registry.registry import Registry
from d9d_engine.job import Job
from d9d_moe.balancing.config import AuxiliaryLossConfig, Balancing, BiasUpdateConfig, ZLossConfig
from pydantic import TypeAdapter


class BalancedConfig(ModelConfig):
    """A model with the field."""

    name: Literal["balanced"] = "balanced"
    """Selects it."""
    balancing: tuple[Balancing, ...] = ()
    """The field."""


class Here(Ref):
    """A reference to something of this file."""

    def load(self) -> Any:
        return BalancedConfig


@hookimpl
def models() -> list[ModelSpec]:
    return [ModelSpec(name="balanced", summary="x", config=Here("x:y"), build=Here("x:y"), tiny=Here("x:y"))]


REGISTRY = Registry.of(toy, SimpleNamespace(d9d_models=models, __name__="acme"))


def load(directory: Path, balancing: str) -> Job:
    path = directory / "job.yaml"
    model = f"model:\n  name: balanced\n  balancing: [{balancing}]\n"
    path.write_text(f"{model}data: toy_data\ntask: toy_task\noptimizer: toy_optimizer\nsteps: 1\n")
    return Job.load(path, registry=REGISTRY)


def test_a_bare_name_takes_the_defaults(tmp_path: Path) -> None:
    job = load(tmp_path, "bias_update, {name: auxiliary_loss, coefficient: 1}, z_loss")
    chosen = (BiasUpdateConfig(), AuxiliaryLossConfig(coefficient=1), ZLossConfig())
    assert job.model == BalancedConfig(balancing=chosen)
    assert job.resolved()["model"]["balancing"][0] == {"name": "bias_update", "rate": 1e-3}
    assert BalancedConfig.model_validate(job.model.model_dump()) == job.model


KINDS = "there are: auxiliary_loss, z_loss, bias_update"


@pytest.mark.parametrize(
    ("balancing", "message"),
    [
        ("{name: auxiliary_loss}", ".coefficient: missing; add 'coefficient:' under 'model.balancing[0]'"),
        ("auxiliary_loss", ".coefficient: missing; add 'coefficient:' under 'model.balancing[0]'"),
        ("{name: z_loss, coefficient: 0}", ".coefficient: input should be greater than 0, got 0"),
        ("{name: z_loss, coeficient: 1}", ".coeficient: not a field of 'z_loss'; did you mean 'coefficient'?"),
        ("bias_updat", f": unknown balancing 'bias_updat'; did you mean 'bias_update'? {KINDS}"),
        ("{name: bias_updat, rate: 1}", f": unknown balancing 'bias_updat'; did you mean 'bias_update'? {KINDS}"),
        ("luck", f": unknown balancing 'luck'; {KINDS}"),
        ("3", ": expected the name of a balancing, or a mapping with 'name', not 3"),
        ("{rate: 1}", ": expected the name of a balancing, or a mapping with 'name', not {'rate': 1}"),
    ],
)
def test_a_mistake_is_described_at_its_place(tmp_path: Path, balancing: str, message: str) -> None:
    with pytest.raises(JobError) as caught:
        load(tmp_path, balancing)
    assert str(caught.value) == f"{tmp_path}/job.yaml:3: model.balancing[0]{message}"


def test_editors_know_the_bare_names_that_are_accepted() -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(Balancing)
    bare, configs = adapter.json_schema()["anyOf"]
    assert bare["enum"] == ["z_loss", "bias_update"]
    assert [adapter.validate_python(name).name for name in bare["enum"]] == bare["enum"]
    assert configs["discriminator"]["mapping"].keys() == {"auxiliary_loss", *bare["enum"]}
    assert job_schema(REGISTRY)["$defs"]
