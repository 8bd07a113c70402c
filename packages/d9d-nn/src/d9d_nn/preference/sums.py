"""Sums over ranks that share the positions of samples, with gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.autograd.function import once_differentiable


def summed(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum of the tensors of all ranks, on each rank. Collective over the group, forward and backward.

    Each rank computes a loss from the result, and the loss of the job is the sum of these losses. The backward
    therefore adds up the gradients of all ranks.
    """
    out: Tensor = _Sum.apply(tensor, group)
    return out


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_reduced(tensor, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _all_reduced(grad, ctx.group), None


def _all_reduced(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total
