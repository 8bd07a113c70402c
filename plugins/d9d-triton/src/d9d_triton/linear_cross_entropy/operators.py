"""Torch operators of the loss, opaque to the compiler: products by torch, passes over the logits by Triton.

Shapes: T tokens, H features, V vocabulary size, P columns of logits in memory, C tokens of a chunk, K tokens whose
logits are kept. An output that is not needed has no elements.
"""

from __future__ import annotations

from typing import Any

import torch
from d9d_nn.ops.linear_cross_entropy import IGNORE
from torch import Tensor

from d9d_triton.linear_cross_entropy.parts import (
    add_product,
    differentiate,
    empty,
    is_one_number,
    only,
    parts_of,
    project,
    read,
    read_and_differentiate,
    results,
    space_for,
    total_of,
    without_ignored,
)


@torch.library.custom_op("d9d_triton::linear_cross_entropy", mutates_args=())
def token_losses(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    rows: int,
    kept: int,
    ranked: bool,
    cast_from: Tensor | None = None,  # noqa: ARG001 - only autograd reads it
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Linear cross-entropy operator: losses; the backward overwrites kept logits and recomputes the others.

    Args:
        hidden: [..., H].
        weight: [V, H].
        targets: int64 [...].
        rows: largest number of tokens in a chunk whose logits are not kept.
        kept: K; the logits of the first K tokens are kept.
        ranked: whether to count the logits above each target's logit.
        cast_from: [V, H], the tensor of a wider dtype from which ``weight`` was cast. If given, it receives the
            gradient instead of ``weight``, in its own dtype, without rounding to the dtype of ``weight`` and casting
            back.

    Returns:
        Losses float32 [...], ranks int64 [...], statistics float32 [2, T], and logits [K, P].
    """
    losses, ranks, statistics = results(hidden, targets, ranked)
    tokens, logits = hidden.flatten(0, -2), space_for(kept, hidden, weight)
    for part, space in parts_of(len(tokens), logits, rows):
        project(tokens[part], weight, space)
        read(space, part, len(weight), targets, losses, ranks, statistics)
    return losses, ranks, statistics, logits


@torch.library.custom_op("d9d_triton::linear_cross_entropy_backward", mutates_args={"logits"})
def gradients(
    grad_losses: Tensor,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    statistics: Tensor,
    logits: Tensor,
    rows: int,
    of_hidden: bool,
    of_weight: bool,
    wide: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Linear cross-entropy operator: gradients of hidden states [..., H], and of the weight [V, H] in dtype ``wide``.

    Overwrites the kept logits with their gradient.
    """
    tokens, masked = hidden.flatten(0, -2), without_ignored(hidden, targets, of_weight)
    grad_hidden = empty(hidden, hidden.dtype, of_hidden)
    parts = parts_of(len(tokens), logits, rows)
    # A sum over many chunks would lose bits in a narrow dtype; a single product accumulates in float32 anyway.
    dtype = wide if len(parts) == 1 else torch.float32
    total: Tensor | None = None
    for part, space in parts:
        if part.stop > len(logits):
            project(tokens[part], weight, space)
        grad = differentiate(space, part, len(weight), targets, statistics, grad_losses)
        if of_hidden:
            torch.mm(grad, weight, out=grad_hidden.flatten(0, -2)[part])
        if of_weight:
            total = add_product(total, grad.t(), masked[part], dtype)
    return grad_hidden, total_of(total, weight, of_weight).to(wide)


@torch.library.custom_op("d9d_triton::linear_cross_entropy_ahead", mutates_args=())
def token_losses_ahead(
    hidden: Tensor, weight: Tensor, targets: Tensor, rows: int, ranked: bool, of_hidden: bool, of_weight: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Linear cross-entropy operator: losses, and in the same pass the gradients of their sum, chunk by chunk.

    Args:
        hidden: [..., H].
        weight: [V, H].
        targets: int64 [...].
        rows: largest number of tokens in a chunk.
        ranked: whether to count the logits above each target's logit.
        of_hidden: whether the hidden states need a gradient.
        of_weight: whether the weight needs a gradient.

    Returns:
        Losses float32 [...], ranks int64 [...], statistics float32 [2, T], and float32 gradients [..., H] and [V, H].
    """
    losses, ranks, statistics = results(hidden, targets, ranked)
    tokens, masked = hidden.flatten(0, -2), without_ignored(hidden, targets, of_weight)
    unit_hidden = empty(hidden, torch.float32, of_hidden)
    total: Tensor | None = None
    for part, space in parts_of(len(tokens), space_for(0, hidden, weight), rows):
        project(tokens[part], weight, space)
        grad = read_and_differentiate(space, part, len(weight), targets, losses, ranks, statistics)
        if of_hidden:
            unit_hidden.flatten(0, -2)[part] = add_product(None, grad, weight, torch.float32)
        if of_weight:
            total = add_product(total, grad.t(), masked[part], torch.float32)
    return losses, ranks, statistics, unit_hidden, total_of(total, weight, of_weight).float()


@torch.library.custom_op("d9d_triton::linear_cross_entropy_scale", mutates_args=())
def scaled_gradients(
    grad_losses: Tensor, targets: Tensor, unit_hidden: Tensor, unit_weight: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Scale the gradients of :func:`token_losses_ahead` and cast them to ``dtype``.

    The weight gradient is correct only if the gradients of all losses are equal.
    """
    each = grad_losses.masked_fill(targets == IGNORE, 0).unsqueeze(-1)
    one = grad_losses.flatten()[:1].sum()  # zero if there are no tokens
    return _times(unit_hidden, each, dtype), _times(unit_weight, one, dtype)


# --- shapes of the operators' outputs, for tracing


@token_losses.register_fake
def _fake_losses(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    _rows: int,
    kept: int,
    ranked: bool,
    _cast_from: Tensor | None = None,
) -> tuple[Tensor, ...]:
    return *results(hidden, targets, ranked), space_for(kept, hidden, weight)


@gradients.register_fake
def _fake_gradients(
    _grad_losses: Tensor,
    hidden: Tensor,
    weight: Tensor,
    _targets: Tensor,
    _statistics: Tensor,
    _logits: Tensor,
    _rows: int,
    of_hidden: bool,
    of_weight: bool,
    wide: torch.dtype,
) -> tuple[Tensor, Tensor]:
    return empty(hidden, hidden.dtype, of_hidden), empty(weight, wide, of_weight)


@token_losses_ahead.register_fake
def _fake_losses_ahead(
    hidden: Tensor, weight: Tensor, targets: Tensor, _rows: int, ranked: bool, of_hidden: bool, of_weight: bool
) -> tuple[Tensor, ...]:
    wide = torch.float32
    return *results(hidden, targets, ranked), empty(hidden, wide, of_hidden), empty(weight, wide, of_weight)


@scaled_gradients.register_fake
def _fake_scaled(
    _grad_losses: Tensor, _targets: Tensor, unit_hidden: Tensor, unit_weight: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(unit_hidden, dtype=dtype), torch.empty_like(unit_weight, dtype=dtype)


# --- autograd

#: Index of ``cast_from`` in the arguments of :func:`token_losses`.
_CAST_FROM = 6


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, targets, ctx.rows, kept, _, cast_from = inputs
    _, ranks, statistics, logits = output
    ctx.of_cast, ctx.wide = cast_from is not None, (weight if cast_from is None else cast_from).dtype
    # Saved tensors make autograd refuse a second backward once the first one has overwritten kept logits.
    ctx.save_for_backward(hidden, weight, targets, statistics, *((logits,) if kept else ()))
    ctx.mark_non_differentiable(ranks, statistics, logits)
    ctx.set_materialize_grads(False)  # materialized zeros would be as large as the logits


def _backward(ctx: Any, grad_losses: Tensor | None, *_others: None) -> tuple[Tensor | None, ...]:
    of_hidden: Tensor | None = None
    of_weight: Tensor | None = None
    if grad_losses is not None:
        hidden, weight, targets, statistics, *kept = ctx.saved_tensors
        wants = ctx.needs_input_grad[0], ctx.needs_input_grad[_CAST_FROM if ctx.of_cast else 1]
        found = _from_logits(ctx.rows, wants, ctx.wide, grad_losses, hidden, weight, targets, statistics, *kept)
        of_hidden, of_weight = only(wants, found)
    both = (None, of_weight) if ctx.of_cast else (of_weight, None)
    return of_hidden, both[0], None, None, None, None, both[1]


def _keep_ahead(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, targets, ctx.rows, *_, of_weight = inputs
    _, ranks, statistics, unit_hidden, unit_weight = output
    ctx.dtype = hidden.dtype
    # Saved to recompute the gradients if the losses turn out to be weighted.
    again = (hidden, weight, statistics) if of_weight else ()
    ctx.save_for_backward(targets, unit_hidden, unit_weight, *again)
    ctx.mark_non_differentiable(ranks, statistics, unit_hidden, unit_weight)
    ctx.set_materialize_grads(False)


def _backward_ahead(ctx: Any, grad_losses: Tensor | None, *_others: None) -> tuple[Tensor | None, ...]:
    found: tuple[Tensor | None, ...] = (None, None)
    if grad_losses is not None:
        wants = ctx.needs_input_grad[:2]
        targets, unit_hidden, unit_weight, *again = ctx.saved_tensors
        if not again or is_one_number(grad_losses):
            both = scaled_gradients(grad_losses, targets, unit_hidden, unit_weight, ctx.dtype)
        else:
            hidden, weight, statistics = again
            wide = weight.dtype
            both = _from_logits(ctx.rows, wants, wide, grad_losses, hidden, weight, targets, statistics)
        found = only(wants, both)
    return *found, None, None, None, None, None


def _from_logits(
    rows: int,
    wants: tuple[bool, bool],
    wide: torch.dtype,
    grad_losses: Tensor,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    statistics: Tensor,
    logits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    logits = space_for(0, hidden, weight) if logits is None else logits
    found: tuple[Tensor, Tensor] = gradients(
        grad_losses, hidden, weight, targets, statistics, logits, rows, *wants, wide
    )
    return found


token_losses.register_autograd(_backward, setup_context=_keep)
token_losses_ahead.register_autograd(_backward_ahead, setup_context=_keep_ahead)


# --- helpers of the operators


def _times(unit: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """``unit * factor``, rounded once; empty if ``unit`` is empty."""
    out = torch.empty(unit.shape, dtype=dtype, device=unit.device)
    return torch.mul(unit, factor, out=out) if unit.numel() else out
