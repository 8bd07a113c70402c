"""Torch operators of the narrow loss: the forward computes the gradients in the memory that the backward returns.

The forward adds up the gradients of the sum of all losses, one chunk of tokens after the other, in the dtypes of hidden
states and weight. The backward scales these gradients in place, or overwrites them if the loss is not a multiple of the
sum, and returns them. So the weight gradient is the only additional tensor of the weight's size.

Each chunk rounds the weight gradient to its dtype. With N chunks whose contributions have random signs, the error is
``sqrt((N + 1) / 2)`` times the error of one rounding, and an addend below half a unit in the last place of the sum is
lost. Softmax statistics, and the sums inside a product, are float32.

Shapes: T tokens, H features, V vocabulary size, C tokens of a chunk. A gradient that is not needed has no elements.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from d9d_nn.ops.linear_cross_entropy import IGNORE
from torch import Tensor

from d9d_triton.linear_cross_entropy.parts import (
    differentiate,
    empty,
    is_one_number,
    only,
    parts_of,
    project,
    read_and_differentiate,
    results,
    space_for,
    without_ignored,
)

#: Height of a matrix product's tile in tokens; larger chunks have a multiple of it.
TILE = 128


@torch.library.custom_op("d9d_triton::linear_cross_entropy_narrow", mutates_args=())
def token_losses_narrow(
    hidden: Tensor, weight: Tensor, targets: Tensor, rows: int, ranked: bool, of_hidden: bool, of_weight: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Narrow linear cross-entropy: losses, and the gradients of their sum, which the backward scales or overwrites.

    Args:
        hidden: [..., H].
        weight: [V, H].
        targets: int64 [...].
        rows: largest number of tokens in a chunk.
        ranked: whether to count the logits above each target's logit.
        of_hidden: whether the hidden states need a gradient.
        of_weight: whether the weight needs a gradient.

    Returns:
        Losses float32 [...], ranks int64 [...], statistics float32 [2, T], and gradients [..., H] and [V, H] in the
        dtypes of hidden states and weight.
    """
    losses, ranks, statistics = results(hidden, targets, ranked)
    grads = empty(hidden, hidden.dtype, of_hidden), empty(weight, weight.dtype, of_weight)
    for part, space in _logits(hidden, weight, rows):
        grad = read_and_differentiate(space, part, len(weight), targets, losses, ranks, statistics)
        _add(grads, grad, part, hidden, weight, targets)
    if not targets.numel():
        grads[1].zero_()
    return losses, ranks, statistics, *grads


@torch.library.custom_op("d9d_triton::linear_cross_entropy_narrow_scale", mutates_args={"grad_hidden", "grad_weight"})
def scale(grad_losses: Tensor, targets: Tensor, grad_hidden: Tensor, grad_weight: Tensor) -> None:
    """Scale the gradients of :func:`token_losses_narrow` in place.

    The weight gradient is correct only if the gradients of all losses are equal.
    """
    each = grad_losses.masked_fill(targets == IGNORE, 0).unsqueeze(-1)
    # [1, 1], because a 0-d tensor would be rounded to the dtype of the gradient before the multiplication.
    one = grad_losses.flatten()[:1].sum().view(1, 1)
    for grad, factor in ((grad_hidden, each), (grad_weight, one)):
        if grad.numel():
            torch.mul(grad, factor, out=grad)


@torch.library.custom_op("d9d_triton::linear_cross_entropy_narrow_again", mutates_args={"grad_hidden", "grad_weight"})
def compute_again(
    grad_losses: Tensor,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    statistics: Tensor,
    grad_hidden: Tensor,
    grad_weight: Tensor,
    rows: int,
) -> None:
    """Overwrite the gradients of :func:`token_losses_narrow` for a weighted loss, with three more products."""
    grads = grad_hidden, grad_weight
    for part, space in _logits(hidden, weight, rows):
        grad = differentiate(space, part, len(weight), targets, statistics, grad_losses)
        _add(grads, grad, part, hidden, weight, targets)


@token_losses_narrow.register_fake
def _fake_losses(
    hidden: Tensor, weight: Tensor, targets: Tensor, _rows: int, ranked: bool, of_hidden: bool, of_weight: bool
) -> tuple[Tensor, ...]:
    grads = empty(hidden, hidden.dtype, of_hidden), empty(weight, weight.dtype, of_weight)
    return *results(hidden, targets, ranked), *grads


# --- autograd


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, targets, ctx.rows, *_, of_weight = inputs
    _, ranks, statistics, *grads = output
    # Saved to recompute the gradients if the losses turn out to be weighted.
    again = (hidden, weight, statistics) if of_weight else ()
    # Autograd refuses a second backward once the first has scaled the gradients.
    ctx.save_for_backward(targets, *grads, *again)
    ctx.mark_non_differentiable(ranks, statistics, *grads)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_losses: Tensor | None, *_others: None) -> tuple[Tensor | None, ...]:
    found: tuple[Tensor | None, ...] = (None, None)
    if grad_losses is not None:
        targets, grad_hidden, grad_weight, *again = ctx.saved_tensors
        wanted = zip((grad_hidden, grad_weight), ctx.needs_input_grad[:2], strict=True)
        grads = tuple(grad if asked else grad.new_empty(0) for grad, asked in wanted)
        if not again or is_one_number(grad_losses):
            scale(grad_losses, targets, *grads)
        else:
            hidden, weight, statistics = again
            compute_again(grad_losses, hidden, weight, targets, statistics, *grads, ctx.rows)
        found = only(ctx.needs_input_grad[:2], grads)
    return *found, None, None, None, None, None


token_losses_narrow.register_autograd(_backward, setup_context=_keep)


# --- parts of the operators


def _logits(hidden: Tensor, weight: Tensor, rows: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield chunks of tokens, each with its logits [C, P], which the next chunk overwrites."""
    tokens = hidden.flatten(0, -2)
    for part, space in parts_of(len(tokens), space_for(0, hidden, weight), rows, TILE):
        project(tokens[part], weight, space)
        yield part, space


def _add(
    grads: tuple[Tensor, Tensor], grad: Tensor, part: slice, hidden: Tensor, weight: Tensor, targets: Tensor
) -> None:
    """Write a chunk's rows of the hidden states' gradient, and add the chunk's weight gradient to the sum.

    Args:
        grads: gradients of hidden states and weight; the first chunk overwrites the weight gradient.
        grad: gradient of the chunk's logits [C, V].
        part: tokens of the chunk.
        hidden: [..., H].
        weight: [V, H].
        targets: int64 [...].
    """
    of_hidden, of_weight = grads
    if of_hidden.numel():
        torch.mm(grad, weight, out=of_hidden.flatten(0, -2)[part])
    if of_weight.numel():
        tokens = without_ignored(hidden.flatten(0, -2)[part], targets.flatten()[part], True)
        if part.start == 0:
            torch.mm(grad.t(), tokens, out=of_weight)
        else:
            torch.addmm(of_weight, grad.t(), tokens, out=of_weight)
