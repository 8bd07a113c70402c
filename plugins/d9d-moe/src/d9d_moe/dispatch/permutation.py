"""Ops ``permute`` (copy tokens to rows) and ``unpermute`` (sum rows to tokens), each with the other as its backward.

The gradients are implemented explicitly, because autograd's gradient of indexing adds rows atomically, in any order and
in the narrow dtype. Sums add the experts of a token one after another, so that no tensor of T x k x H in float32 is
made. All operations are plain indexing, which a compiler fuses.

Shapes: T tokens, H features, k choices of each token, R rows, at most one for each choice.

Two tensors relate rows and choices:

- slots: int64 [R], the choice of each row: ``token * k + index among the token's k choices``.
- places: int64 [T, k], the row of each choice, the inverse of ``slots``. A value of R or more means that the choice has
  no row (is absent). The host knows whether there can be absent choices (``absent``); if not, masking is skipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from d9d_core.kernel import OpSlot
from torch import Tensor
from torch.autograd.function import once_differentiable


class PermutingDispatcher:
    """Base of dispatchers that copy tokens to rows and sum rows to tokens with the backends of both ops.

    Attributes:
        permute: slot of :func:`permute`.
        unpermute: slot of :func:`unpermute`.
    """

    def __init__(self) -> None:
        self.permute = OpSlot("permute", permute)
        self.unpermute = OpSlot("unpermute", unpermute)

    def op_slots(self) -> Mapping[str, OpSlot]:
        """Slots of both ops, for the layer that has the dispatcher."""
        return {"permute": self.permute, "unpermute": self.unpermute}


def permute(tokens: Tensor, slots: Tensor, places: Tensor, *, absent: bool = False) -> Tensor:
    """Copy each token to its rows.

    Args:
        tokens: [T, H].
        slots: int64 [R], the choice of each row.
        places: int64 [T, k], the row of each choice. A row to which no choice refers gets a copy too, and its gradient
            is dropped.
        absent: whether choices may be absent.

    Returns:
        [R, H].
    """
    rows: Tensor = _Permute.apply(tokens, slots, places, absent)
    return rows


def unpermute(
    rows: Tensor, slots: Tensor, places: Tensor, weights: Tensor | None = None, *, absent: bool = False
) -> Tensor:
    """Undo the permutation of a dispatch: sum each token's rows, optionally weighted, in float32 or wider.

    Args:
        rows: [R, H].
        slots: int64 [R], the choice of each row.
        places: int64 [T, k], the row of each choice.
        weights: [T, k], factor of each choice's row; ``None`` for 1. Weights of absent choices get zero gradients.
        absent: whether choices may be absent. Without weights, the gradients of rows to which no choice refers are
            arbitrary.

    Returns:
        [T, H] in the dtype of ``rows``.
    """
    if weights is None:
        total: Tensor = _SumRows.apply(rows, slots, places, absent)
    else:
        total = _Unpermute.apply(rows, slots, places, weights, absent)
    return total


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, slots: Tensor, places: Tensor, absent: bool) -> Tensor:
        ctx.save_for_backward(places)
        ctx.absent = absent
        return copied(tokens, slots, places.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rows: Tensor) -> tuple[Tensor, None, None, None]:
        (places,) = ctx.saved_tensors
        return summed(grad_rows, places, ctx.absent), None, None, None


class _SumRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, slots: Tensor, places: Tensor, absent: bool) -> Tensor:
        ctx.save_for_backward(slots)
        ctx.choices = places.shape[1]
        return summed(rows, places, absent)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (slots,) = ctx.saved_tensors
        return copied(grad, slots, ctx.choices), None, None, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, slots: Tensor, places: Tensor, weights: Tensor, absent: bool) -> Tensor:
        ctx.save_for_backward(rows, slots, places, weights)
        ctx.absent = absent
        return summed(rows, places, absent, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, Tensor, None]:
        rows, slots, places, weights = ctx.saved_tensors
        grad_rows = copied(grad, slots, places.shape[1])
        grad_weights = torch.zeros_like(weights)
        if len(rows):
            products = _row_products(grad_rows, rows, len(places), torch.promote_types(_wide(rows), weights.dtype))
            grad_weights = products.index_select(0, _safe(places, rows, ctx.absent).flatten()).view_as(weights)
            if ctx.absent:
                grad_weights = grad_weights.masked_fill(places >= len(rows), 0)
        factors = weights.flatten().index_select(0, slots).unsqueeze(1)
        # The in-place product is computed in the wider of both dtypes and rounded once, without a wide copy of all
        # rows.
        grad_rows.mul_(factors)
        return grad_rows, None, None, grad_weights.to(weights.dtype), None


def copied(tokens: Tensor, slots: Tensor, choices: int) -> Tensor:
    """Copy tokens [T, H] to their rows [R, H]; without a gradient."""
    return tokens.index_select(0, slots // choices)


def summed(rows: Tensor, places: Tensor, absent: bool, weights: Tensor | None = None) -> Tensor:
    """Sum rows [R, H] to [T, H] in float32 or wider, rounded once; without a gradient."""
    dtype = _wide(rows) if weights is None else torch.promote_types(_wide(rows), weights.dtype)
    total = rows.new_zeros(len(places), rows.shape[1], dtype=dtype)
    for choice, place in enumerate(places.unbind(1) if len(rows) else ()):
        part = rows.index_select(0, _safe(place, rows, absent))
        if absent:  # masks rows, not weights: spare rows may hold NaN
            part.masked_fill_((place >= len(rows)).unsqueeze(1), 0)
        # Both in-place operations convert to the wider dtype while they add, without a wide copy of the rows.
        if weights is None:
            total.add_(part)
        else:
            total.addcmul_(part, weights[:, choice].unsqueeze(1))
    # Return a view: torch 2.11 gives zero gradients for a compiled function that returns a tensor summed in place.
    return total.view_as(total) if total.dtype == rows.dtype else total.to(rows.dtype)


def _row_products(first: Tensor, second: Tensor, chunk: int, dtype: torch.dtype) -> Tensor:
    """Inner products [R] of rows [R, H], computed in a wide dtype, a chunk of rows at a time."""
    if torch.compiler.is_compiling():  # fused without a wide copy; chunks would recompile
        chunk = len(first)
    pairs = zip(torch.split(first, chunk), torch.split(second, chunk), strict=True)
    return torch.cat([(a.to(dtype) * b).sum(1) for a, b in pairs])


def _safe(place: Tensor, rows: Tensor, absent: bool) -> Tensor:
    return place.clamp(max=len(rows) - 1) if absent else place


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
