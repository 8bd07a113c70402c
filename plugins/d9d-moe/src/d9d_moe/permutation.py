"""Copying tokens to rows and summing rows to tokens, each the other's backward.

Written out, because autograd's gradient of an index adds rows up atomically: in any order, and in the narrow dtype.
Sums run over the experts of a token one after the other, so that no tensor of T x k x H in float32 ever exists.

Shapes: T tokens, H features, k rows of each token, R = T * k rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def gather_rows(tokens: Tensor, sources: Tensor, places: Tensor) -> Tensor:
    """Copy each token to its rows.

    Args:
        tokens: [T, H].
        sources: int64 [R], token of each row.
        places: int64 [T, k], rows of each token: the inverse of ``sources``.

    Returns:
        [R, H].
    """
    rows: Tensor = _GatherRows.apply(tokens, sources, places)
    return rows


def weighted_sum(rows: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """Sum each token's rows, times its weights, in the dtype of the weights or wider.

    Args:
        rows: [R, H].
        places: int64 [T, k], rows of each token; each row is in it once.
        weights: [T, k].

    Returns:
        [T, H] in the dtype of ``rows``.
    """
    total: Tensor = _WeightedSum.apply(rows, places, weights)
    return total


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, sources: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return tokens.index_select(0, sources)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rows: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        total = grad_rows.new_zeros(len(places), grad_rows.shape[1], dtype=_wide(grad_rows))
        for place in places.unbind(1):
            total += grad_rows.index_select(0, place)
        return total.to(grad_rows.dtype), None, None


class _WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(rows, places, weights)
        total = rows.new_zeros(len(places), rows.shape[1], dtype=torch.promote_types(_wide(rows), weights.dtype))
        for place, weight in zip(places.unbind(1), weights.unbind(1), strict=True):
            total += rows.index_select(0, place) * weight.unsqueeze(1)
        return total.to(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor]:
        rows, places, weights = ctx.saved_tensors
        wide = grad.to(torch.promote_types(_wide(rows), weights.dtype))
        grad_rows, grad_weights = torch.empty_like(rows), []
        for place, weight in zip(places.unbind(1), weights.unbind(1), strict=True):
            grad_rows.index_copy_(0, place, (wide * weight.unsqueeze(1)).to(rows.dtype))
            grad_weights.append((wide * rows.index_select(0, place)).sum(dim=1))
        return grad_rows, None, torch.stack(grad_weights, dim=1).to(weights.dtype)
