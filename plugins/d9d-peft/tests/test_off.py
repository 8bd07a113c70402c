"""Terms that are switched off, where the model is sharded and compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from d9d_peft.config import LoraConfig
from d9d_peft.lora.method import Lora
from d9d_testing.layouts import job_of, topology_here
from d9d_testing.world import World
from torch import Tensor, nn

PLUGINS = ("d9d_testing.toy.plugin", "d9d_parallel.plugin", "d9d_peft.plugin")
LORA = {"name": "lora", "r": 2}
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


def outputs(directory: str) -> list[Tensor]:
    """What the model computes; then, with terms: after training, switched off, and in the end."""
    run = {"run": {"dir": directory}}
    plain = job_of({**JOB, **run}, PLUGINS)
    topology = topology_here(plain)
    found = [forward(plain.build(lambda _: None, topology).stage)]
    trainer = job_of({**JOB, **run, "peft": LORA}, PLUGINS).build(lambda _: None, topology)
    for name, parameter in trainer.stage.named_parameters():
        if "lora_B" in name:
            nn.init.constant_(parameter, 0.5)
    found.append(forward(trainer.stage))
    method = Lora(LoraConfig.model_validate(LORA))
    with method.off(trainer.stage):
        found.append(forward(trainer.stage))
    return [*found, forward(trainer.stage)]


@pytest.mark.thorough
def test_a_sharded_and_compiled_model_computes_as_before_while_its_terms_are_off(tmp_path: Any) -> None:
    for plain, adapted, off, again in World(2).run(outputs, str(tmp_path)):
        torch.testing.assert_close(off, plain)
        torch.testing.assert_close(again, adapted)
        assert (adapted - plain).abs().max() > 0.01
