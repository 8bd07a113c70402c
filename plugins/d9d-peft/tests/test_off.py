"""Terms that are switched off, where the model is sharded and compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from d9d_core.peft import SwitchesOff
from d9d_peft.config import DoraConfig, LoraConfig
from d9d_peft.ia3.config import Ia3Config
from d9d_peft.ia3.method import Ia3
from d9d_peft.lora.dora import Dora
from d9d_peft.lora.method import Lora
from d9d_testing.layouts import job_of, topology_here
from d9d_testing.world import World
from torch import Tensor, nn

PLUGINS = ("d9d_testing.toy.plugin", "d9d_parallel.plugin", "d9d_peft.plugin")
METHODS = (
    (LoraConfig(r=2), Lora),
    (DoraConfig(r=2), Dora),
    (Ia3Config(targets=("layers.0*",), feedforward=("layers.1*",)), Ia3),
)
JOB: dict[str, Any] = {
    "steps": 2,
    "device": "cpu",
    "batch": {"size": 4, "microbatch": 2},
    "model": {"name": "toy_linears", "features": 6, "blocks": 3},
    "data": {"name": "toy_data", "features": 6},
    "task": "toy_task",
    "optimizer": "toy_optimizer",
    "trackers": [],
    "export": False,
    "mesh": {"dp_shard": 2},
    "parallel": ["fsdp", {"name": "compile", "backend": "aot_eager"}],
}


def forward(stage: nn.Module) -> Tensor:
    with torch.no_grad():
        out: Tensor = stage(x=torch.linspace(-1, 1, 30).view(5, 6))["y"]
    return out


def outputs(directory: str) -> list[list[Tensor]]:
    """For each method: outputs of the model; then, adapted, switched off, and in the end."""
    run, found = {"run": {"dir": directory}}, []
    plain = job_of({**JOB, **run}, PLUGINS)
    topology = topology_here(plain)
    expected = forward(plain.build(lambda _: None, topology).stage)
    for config, kind in METHODS:
        stage = job_of({**JOB, **run, "peft": config.model_dump()}, PLUGINS).build(lambda _: None, topology).stage
        for name, parameter in stage.named_parameters():
            if name.endswith(("lora_B.weight", "ia3_l.weight")):
                nn.init.constant_(parameter, 0.5)
        adapted = forward(stage)
        with kind(config).off(stage):
            off = forward(stage)
        found.append([expected, adapted, off, forward(stage)])
    return found


@pytest.mark.full
def test_a_sharded_and_compiled_model_computes_as_before_while_its_terms_are_off(tmp_path: Any) -> None:
    for of_rank in World(2).run(outputs, str(tmp_path)):
        for plain, adapted, off, again in of_rank:
            torch.testing.assert_close(off, plain)
            torch.testing.assert_close(again, adapted)
            assert (adapted - plain).abs().max() > 0.01


def test_a_method_that_trains_modules_of_the_model_cannot_be_switched_off() -> None:
    assert isinstance(Lora(LoraConfig()), SwitchesOff)
    assert not isinstance(Lora(LoraConfig(modules_to_save=("norm",))), SwitchesOff)
