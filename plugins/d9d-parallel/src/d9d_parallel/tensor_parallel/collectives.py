"""Collectives of tensor parallelism with their gradients.

Shapes: R ranks of the group; a tensor's dim ``dim`` has S positions on all ranks together, and S / R on each.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.autograd.function import once_differentiable

from d9d_parallel.ranks import Ranks


class RankSum:
    """Sum over ranks, for use in modules; without gradients.

    Args:
        ranks: ranks whose tensors are summed.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    @torch.no_grad()
    def __call__(self, tensor: Tensor) -> Tensor:
        """Return the sum of the ranks' tensors of one shape; the argument is unchanged. Collective over the ranks."""
        total = tensor.detach().clone()
        dist.all_reduce(total, group=self._ranks.group)
        return total


class OwnPositions:
    """Positions of this tensor-parallel rank, and their collectives: a :class:`~d9d_core.model.SequenceShare`.

    Args:
        ranks: ranks that share the positions.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def gather(self, tensor: Tensor) -> Tensor:
        """Gather [B, S / R, ...] of all ranks to [B, S, ...]. Collective over the ranks in the forward only."""
        return gather(tensor, self._ranks, summed=False)

    def own(self, tensor: Tensor) -> Tensor:
        """This rank's positions [B, S / R, ...] of [B, S, ...].

        Raises:
            ValueError: the ranks do not divide S.
        """
        check_divides(tensor.shape[1], self._ranks)
        return tensor.chunk(self._ranks.size, dim=1)[self._ranks.rank]


def gather(tensor: Tensor, ranks: Ranks, *, summed: bool, dim: int = 1) -> Tensor:
    """All-gather the parts of all ranks along a dim. Collective over the ranks, and in the backward if ``summed``.

    Args:
        tensor: this rank's part; the same shape on all ranks.
        ranks: ranks in the order of the parts.
        summed: whether ranks compute different values from the result, so that its gradients are summed over the
            ranks (a reduce-scatter). If not, all ranks compute the same, and each keeps its part of the gradient.
        dim: dim to gather.
    """
    out: Tensor = _Gather.apply(tensor, ranks, summed, dim)
    return out


def scatter_sum(tensor: Tensor, ranks: Ranks, *, dim: int = 1) -> Tensor:
    """Reduce-scatter partial sums: each rank gets its part of the sum along a dim. Collective, in forward and backward.

    Args:
        tensor: partial sum of this rank; the same shape on all ranks.
        ranks: ranks in the order of the parts.
        dim: dim to scatter.

    Raises:
        ValueError: the number of ranks does not divide the dim.
    """
    check_divides(tensor.shape[dim], ranks)
    out: Tensor = _ScatterSum.apply(tensor, ranks, dim)
    return out


def check_divides(positions: int, ranks: Ranks) -> None:
    """Raise an error if positions cannot be divided evenly over the ranks.

    Raises:
        ValueError: the number of ranks does not divide the positions.
    """
    if positions % ranks.size:
        raise ValueError(
            f"tensor_parallel splits positions over mesh.tp = {ranks.size} ranks, which does not divide the "
            f"{positions} positions of this batch; pad samples to a multiple, or choose another tp"
        )


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: Ranks, summed: bool, dim: int) -> Tensor:
        ctx.ranks, ctx.summed, ctx.dim = ranks, summed, dim
        return _all_gather(tensor, ranks, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.summed:
            return _reduce_scatter(grad, ctx.ranks, ctx.dim), None, None, None
        return grad.chunk(ctx.ranks.size, dim=ctx.dim)[ctx.ranks.rank].contiguous(), None, None, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: Ranks, dim: int) -> Tensor:
        ctx.ranks, ctx.dim = ranks, dim
        return _reduce_scatter(tensor, ranks, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _all_gather(grad, ctx.ranks, ctx.dim), None, None


def _all_gather(tensor: Tensor, ranks: Ranks, dim: int) -> Tensor:
    parts = tensor.new_empty(ranks.size, *tensor.shape)
    dist.all_gather_into_tensor(parts.flatten(0, 1), tensor.contiguous(), group=ranks.group)
    # [R, ..., S / R, ...] -> [..., S, ...]; without a copy if all dims before ``dim`` have size one.
    return parts.movedim(0, dim).flatten(dim, dim + 1)


def _reduce_scatter(tensor: Tensor, ranks: Ranks, dim: int) -> Tensor:
    parts = torch.stack(tensor.chunk(ranks.size, dim=dim))
    out = torch.empty_like(parts[0])
    dist.reduce_scatter_tensor(out, parts.flatten(0, 1), group=ranks.group)
    # Dynamo of torch 2.11 loses the gradient of a tensor that a Function allocated and filled; a view keeps it.
    return out.view_as(out)
