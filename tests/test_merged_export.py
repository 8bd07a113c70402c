"""An export of a fine-tuning run merges shards and leaves them as they were."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from d9d_core.tensors import local
from d9d_testing.layouts import job_of, topology_here
from d9d_testing.toy.modifiers import ToyPeft
from safetensors.torch import load_file
from torch import distributed as dist
from torch import nn

PLUGINS = ("d9d_testing.toy.plugin", "d9d_parallel.plugin")


@torch.no_grad()
def merge(_self: ToyPeft, stage: nn.Module) -> None:
    """Doubles a sharded weight, as a DTensor, and adds to another one's shard."""
    first, second = stage.get_parameter("layers.0.weight"), stage.get_parameter("layers.1.weight")
    first.mul_(2)
    local(second).add_(1)


def export(directory: str) -> bool:
    """Whether this rank's shards were merged in the written files and are unchanged afterwards."""
    ToyPeft.merge = merge  # type: ignore[method-assign]
    job = job_of(
        {
            "run": {"name": "toy", "dir": directory},
            "steps": 2,
            "device": "cpu",
            "batch": {"size": 4},
            "mesh": {"dp_shard": 2},
            "model": "toy_model",
            "data": "toy_data",
            "task": "toy_task",
            "optimizer": "toy_optimizer",
            "peft": "toy_peft",
            "parallel": ["fsdp"],
            "trackers": [],
        },
        PLUGINS,
    )
    trainer = job.build(lambda _note: None, topology_here(job))
    trainer.train()
    parameters = dict(trainer.stage.named_parameters())
    before = {name: local(parameter).detach().clone() for name, parameter in parameters.items()}
    whole = {name: p.full_tensor().detach() for name, p in parameters.items() if "layers" in name}  # type: ignore[attr-defined]
    trainer.export()
    after = dict(trainer.stage.named_parameters())
    written = load_file(Path(directory) / "toy" / "model" / "model.safetensors")
    assert torch.equal(written["toy.layers.0.weight"], whole["layers.0.weight"] * 2)
    assert torch.equal(written["toy.layers.1.weight"], whole["layers.1.weight"] + 1)
    dist.barrier()
    trainer.export()
    again = load_file(Path(directory) / "toy" / "model" / "model.safetensors")
    assert all(torch.equal(written[name], again[name]) for name in written)
    dist.barrier()
    return all(after[name] is p and torch.equal(local(p), before[name]) for name, p in parameters.items())


@pytest.mark.thorough
def test_shards_are_merged_for_an_export_and_put_back(world: Callable[..., Any], tmp_path: Path) -> None:
    assert world(2).run(export, str(tmp_path)) == [True, True]
