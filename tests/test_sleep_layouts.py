"""A trainer that sleeps and wakes between steps trains as if it had not, bit for bit, in every layout."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from d9d_testing.layouts import job_of, topology_here
from d9d_testing.world import World
from torch import Tensor

Write = Callable[..., Path]
PLUGINS = [
    "d9d_nn.plugin", "d9d_data.plugin", "d9d_optim.plugin", "d9d_parallel.plugin", "d9d_moe.plugin",
    "d9d_pipeline.plugin", "d9d_qwen3.plugin",
]  # fmt: skip
MOE = {
    "name": "qwen3_moe", "vocab_size": 257, "hidden_size": 32, "moe_intermediate_size": 32, "num_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_positions": 64, "num_experts": 4, "experts_per_token": 2,
}  # fmt: skip
LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp2": {"mesh": {"dp_shard": 2}, "parallel": ["fsdp"]},
    "pp2": {"mesh": {"pp": 2}, "pipeline": "1f1b"},
    "moe-ep2": {"model": MOE, "mesh": {"dp_shard": 2, "ep": 2}, "parallel": ["fsdp", "expert_parallel"]},
}


def occupied(tensors: list[Tensor]) -> int:
    from d9d_core.tensors import local

    return sum(local(tensor.detach()).untyped_storage().nbytes() for tensor in tensors if tensor.device.type != "meta")


def train(cases: list[tuple[dict[str, Any], bool]]) -> list[list[tuple[float, float]]]:
    """Loss and gradient norm of every step, with sleep after the second and the fourth if it is asked for."""
    from torch.distributed.distributed_c10d import Backend

    found = []
    for values, sleeps in cases:
        job = job_of(values, PLUGINS)
        # NCCL's communicators stay awake where torch cannot suspend them, which is an error if asked for.
        everything = hasattr(Backend, "suspend") or values["device"] == "cpu"
        tags: tuple[Any, ...] = () if everything else ("weights", "optimizer")
        numbers = []
        with job.build(lambda _note: None, topology_here(job)) as trainer:
            for result in trainer.steps():
                numbers.append((result.loss.item(), result.grad_norm.item()))
                if sleeps and trainer.progress.step in (2, 4):
                    held = [*trainer.stage.parameters(), *trainer.stage.buffers()]
                    held += trainer.step.optimizer.state().values()
                    trainer.sleep(*tags)
                    assert occupied(held) == 0
                    trainer.wake("weights")
                    trainer.wake()
        found.append(numbers)
    return found


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sleep_changes_no_bit(small_job: Write, world: type[World], layout: str) -> None:
    common = {"export": False, "trackers": [], "checkpoint": {"every": 3}, **LAYOUTS[layout]}
    cases = [
        (json.loads(small_job(name, **common).read_text()), name == "sleeping") for name in ("straight", "sleeping")
    ]
    for straight, sleeping in world(2).run(train, cases):
        assert len(straight) == 6
        assert straight == sleeping


@pytest.mark.gpu
@pytest.mark.gpus(2)
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sleep_changes_no_bit_on_gpus(small_job: Write, layout: str) -> None:
    common = {
        "export": False, "trackers": [], "checkpoint": {"every": 3}, "device": "cuda", "deterministic": True,
        "precision": {"parameters": "bfloat16"}, **LAYOUTS[layout],
    }  # fmt: skip
    cases = [
        (json.loads(small_job(name, **common).read_text()), name == "sleeping") for name in ("straight", "sleeping")
    ]
    for straight, sleeping in World(2, timeout=180.0, backend="cpu:gloo,cuda:nccl").run(train, cases):
        assert len(straight) == 6
        assert straight == sleeping
