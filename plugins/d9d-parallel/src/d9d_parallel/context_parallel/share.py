"""Positions of a sample that one rank of ``cp`` has, and exchanges of tensors that have a dimension of positions.

Shapes: B samples, S positions, R ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from d9d_engine.distributed.positions import ZigzagPositions
from torch import Tensor
from torch import distributed as dist
from torch.autograd.function import once_differentiable

from d9d_parallel.ranks import Ranks


class ContextPositions:
    """Positions of this rank: a :class:`~d9d_core.model.ContextShare`.

    Args:
        ranks: ranks of ``cp``.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._positions = ZigzagPositions(ranks.size, ranks.rank)

    @property
    def all_ranks(self) -> Ranks:
        """Ranks that share the positions of a sample."""
        return self._ranks

    @property
    def ranks(self) -> int:
        """Number of ranks that share the positions of a sample."""
        return self._ranks.size

    def own(self, tensor: Tensor) -> Tensor:
        """This rank's positions [B, S / R, ...] of [B, S, ...].

        Raises:
            ValueError: 2 R does not divide S.
        """
        return self._positions.own(tensor)

    def gather(self, tensor: Tensor) -> Tensor:
        """Gather [B, S / R, ...] of all ranks to [B, S, ...]; gradients are summed. Collective, backward too."""
        out: Tensor = _Gather.apply(tensor, self._ranks)
        return out


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        parts = tensor.new_empty(ranks.size, *tensor.shape)
        dist.all_gather_into_tensor(parts.flatten(0, 1), tensor.contiguous(), group=ranks.group)
        return ZigzagPositions.joined(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        parts = ZigzagPositions.parted(grad, ctx.ranks.size).contiguous()
        out = torch.empty_like(parts[0])
        dist.reduce_scatter_tensor(out, parts.flatten(0, 1), group=ctx.ranks.group)
        return out, None


def exchange(parts: Tensor, ranks: Ranks) -> Tensor:
    """All-to-all: sends slice r of [R, ...] to rank r; slice r of the result is from rank r. Differentiable."""
    out: Tensor = _Exchange.apply(parts, ranks)
    return out


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return _all_to_all(parts, ranks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _all_to_all(grad, ctx.ranks), None


def _all_to_all(parts: Tensor, ranks: Ranks) -> Tensor:
    sent = parts.contiguous()
    out = torch.empty_like(sent)
    dist.all_to_all_single(out, sent, group=ranks.group)
    # Dynamo of torch 2.11 loses the gradient of a tensor that a Function allocated and filled; a view keeps it.
    return out.view_as(out)
