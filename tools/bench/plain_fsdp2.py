"""Baseline in plain PyTorch, without d9d: FSDP2 with the same units, fused AdamW, clipping."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

Microbatches = Sequence[dict[str, Tensor]]


def plain_step(
    model: Any, blocks: Sequence[Any], mesh: DeviceMesh, lr: float, reduce: torch.dtype
) -> Callable[..., Tensor]:
    """Wrap ``model`` and return a function from microbatches to the step's loss."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce)
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for unit in (*blocks, model):
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step(microbatches: Microbatches) -> Tensor:
        weight = torch.stack([(m["targets"] != -100).sum() for m in microbatches]).sum().float()
        dist.all_reduce(weight)
        total = torch.zeros((), device=weight.device)
        for index, microbatch in enumerate(microbatches):
            model.set_is_last_backward(index == len(microbatches) - 1)
            model.set_requires_all_reduce(index == len(microbatches) - 1)
            loss = model(**microbatch)["token_loss"].sum() / weight
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        dist.all_reduce(total)
        return total

    return step
