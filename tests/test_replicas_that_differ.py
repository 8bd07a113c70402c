"""A strategy without meetings that lets replicas drift apart is refused, or makes them equal before each save."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

Write = Callable[..., Path]
D9d = Callable[..., tuple[int, str, str]]

OWN_STEPS = """
from typing import Literal

from d9d_core.config import PluginConfig
from d9d_core.plugin import Ref, StrategySpec, hookimpl


class Config(PluginConfig):
    name: Literal["own_steps"] = "own_steps"
    averages: bool = False


class OwnSteps:
    \"\"\"Each replica takes its own steps.\"\"\"

    def __init__(self, config):
        self.config = config

    def apply(self, stage, topology):
        import torch
        from d9d_core.strategy import Applied, GradientOwner

        group = topology.axes_group("dp_replicate")

        def average():
            before = torch.cat([p.detach().flatten() for p in stage.parameters()])
            for parameter in stage.parameters():
                torch.distributed.all_reduce(parameter.data, group=group)
                parameter.data /= 2
            after = torch.cat([p.detach().flatten() for p in stage.parameters()])
            with open({log!r} + str(topology.rank), "a") as file:
                file.write(f"{{(before - after).norm().item()}}\\n")

        return Applied(
            modules=("",),
            gradients=tuple(GradientOwner(name, "dp_replicate", "none") for name, _ in stage.named_parameters()),
            resynchronise=average if self.config.averages else None,
        )


@hookimpl
def d9d_strategies():
    config, build = Ref(f"{{__name__}}:Config"), Ref(f"{{__name__}}:OwnSteps")
    return [StrategySpec(name="own_steps", summary="Own steps.", config=config, build=build, anchor="data",
                         axes=("dp_replicate",))]
"""


@pytest.fixture
def own_steps(small_job: Write, tmp_path: Path) -> Callable[[bool], Path]:
    plugin = tmp_path / "own_steps.py"
    plugin.write_text(OWN_STEPS.format(log=str(tmp_path / "averaged-")))

    def write(averages: bool) -> Path:
        return small_job(
            "run",
            mesh={"dp_replicate": 2},
            parallel=[{"name": "own_steps", "averages": averages}],
            optimizer={"name": "sgd", "lr": 0.1},
            plugins={"files": [str(plugin)]},
        )

    return write


def test_a_strategy_that_never_makes_its_replicas_equal_is_refused_in_check(
    d9d: D9d, own_steps: Callable[[bool], Path]
) -> None:
    status, _, error = d9d("check", str(own_steps(False)))
    assert status != 0
    assert "parallel[0] (own_steps) leaves the gradient of " in error
    assert "unreduced over dp_replicate, so that its 2 replicas diverge" in error
    assert d9d("check", str(own_steps(True)))[0] == 0


@pytest.mark.full
def test_replicas_are_made_equal_before_each_save_and_the_export(
    d9d: D9d, own_steps: Callable[[bool], Path], tmp_path: Path
) -> None:
    status, _, error = d9d("train", str(own_steps(True)), "--nproc", "2")
    assert status == 0, error
    moved = [[float(line) for line in (tmp_path / f"averaged-{rank}").read_text().split()] for rank in (0, 1)]
    assert len(moved[0]) == len(moved[1]) == 4  # saves after steps 2, 4 and 6, and the export
    for own, other in zip(*moved, strict=True):
        assert own == pytest.approx(other, rel=1e-3, abs=1e-5)
    assert min(moved[0][:3]) > 1e-3  # they had drifted apart
    assert moved[0][3] == 0  # and were equal since the last save
    model = load_file(tmp_path / "runs" / "run" / "model" / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in model.values())
