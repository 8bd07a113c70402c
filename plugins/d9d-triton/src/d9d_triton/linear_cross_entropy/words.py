"""Torch operators of the loss in chunks of the vocabulary: products by torch, passes over the logits by Triton.

The forward computes the logits of one chunk after the other and keeps only three numbers for each token: the largest
logit, the sum of exponentials, and the target's logit. The backward recomputes the logits of each chunk, overwrites
them with their gradient, and computes the chunk's rows of the weight gradient in one product, which accumulates in
float32.

Shapes: T tokens, H features, V vocabulary size, W vocabulary entries of a chunk, P columns of logits in memory. An
output that is not needed has no elements.
"""

from __future__ import annotations

from typing import Any

import torch
from d9d_nn.ops.linear_cross_entropy import IGNORE
from torch import Tensor

from d9d_triton.linear_cross_entropy.parts import add_product, empty, only, results, without_ignored
from d9d_triton.linear_cross_entropy.passes import LOWEST, columns, count_chunk, gradient_in_place, include_chunk

#: With several chunks, W is a multiple of this: products have tiles, and rows must be aligned for vectorized loads.
TILE = 64


@torch.library.custom_op("d9d_triton::linear_cross_entropy_words", mutates_args=())
def token_losses_by_words(
    hidden: Tensor, weight: Tensor, targets: Tensor, size: int, keep: bool, ranked: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Linear cross-entropy by vocabulary chunks: losses; the backward recomputes all logits that are not kept.

    Args:
        hidden: [..., H].
        weight: [V, H].
        targets: int64 [...].
        size: largest W.
        keep: whether to keep the logits of the last chunk, which the backward then overwrites; not if ``ranked``.
        ranked: whether to count the logits above each target's logit. This takes one more product, because the
            target's logit is known only after the last chunk.

    Returns:
        Losses float32 [...], ranks int64 [...], statistics float32 [2, T], and logits [T, P].
    """
    losses, ranks, statistics = results(hidden, targets, ranked)
    tokens, words = hidden.flatten(0, -2), targets.flatten().contiguous()
    _check_words(weight, words)
    statistics[0], statistics[1] = LOWEST, 0.0
    own = torch.zeros_like(statistics[0])
    space, chunks = _space(hidden, weight, size, wanted=True), _chunks(len(weight), size)
    for chunk in chunks:
        logits = _project(tokens, weight, chunk, space)
        include_chunk(logits, words, own, statistics, first=chunk.start, **_facts(chunk))
    # Not as log-sum-exp minus the target's logit: both are large, so their difference would lose fractional bits.
    torch.add(statistics[1].log(), statistics[0] - own, out=losses.view(-1))
    if ranked:
        ranks.zero_()
        for chunk in (*chunks[-1:], *chunks[:-1]):  # the buffer still holds the last chunk's logits
            logits = space if chunk is chunks[-1] else _project(tokens, weight, chunk, space)
            count_chunk(logits, words, own, ranks.view(-1), **_facts(chunk))
        keep = False
    return losses, ranks, statistics, space if keep else _space(hidden, weight, size, wanted=False)


@torch.library.custom_op("d9d_triton::linear_cross_entropy_words_backward", mutates_args={"logits"})
def gradients_by_words(
    grad_losses: Tensor,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    statistics: Tensor,
    logits: Tensor,
    size: int,
    of_hidden: bool,
    of_weight: bool,
) -> tuple[Tensor, Tensor]:
    """Linear cross-entropy by vocabulary chunks: gradients of hidden states [..., H] and weight [V, H].

    Each logit is recomputed by the same product as in the forward, so that its bits match the statistics.

    Args:
        grad_losses: float32 [...].
        hidden: [..., H].
        weight: [V, H].
        targets: int64 [...].
        statistics: float32 [2, T].
        logits: logits of the last chunk [T, P], or no rows if they were not kept; overwritten.
        size: largest W.
        of_hidden: whether the hidden states need a gradient.
        of_weight: whether the weight needs a gradient.
    """
    tokens, masked = hidden.flatten(0, -2), without_ignored(hidden, targets, of_weight)
    words, grads = (tensor.flatten().contiguous() for tensor in (targets, grad_losses))
    kept, chunks = len(logits) > 0, _chunks(len(weight), size)
    space = logits if kept else _space(hidden, weight, size, wanted=True)
    grad_weight = empty(weight, weight.dtype, of_weight)
    # A sum over many chunks would lose bits in a narrow dtype; a single product accumulates in float32 anyway.
    dtype = hidden.dtype if len(chunks) == 1 else torch.float32
    total: Tensor | None = None
    for chunk in reversed(chunks):
        if not kept or chunk is not chunks[-1]:
            _project(tokens, weight, chunk, space)
        gradient_in_place(space, words, statistics, grads, first=chunk.start, **_facts(chunk))
        grad = space[:, : chunk.stop - chunk.start]
        if of_weight:
            torch.mm(grad.t(), masked, out=grad_weight[chunk])
        if of_hidden:
            total = add_product(total, grad, weight[chunk], dtype)
    if total is None:
        return empty(hidden, hidden.dtype, False), grad_weight
    return total.to(hidden.dtype).view(hidden.shape), grad_weight


# --- shapes of the operators' outputs, for tracing


@token_losses_by_words.register_fake
def _fake_losses(
    hidden: Tensor, weight: Tensor, targets: Tensor, size: int, keep: bool, ranked: bool
) -> tuple[Tensor, ...]:
    return *results(hidden, targets, ranked), _space(hidden, weight, size, wanted=keep and not ranked)


@gradients_by_words.register_fake
def _fake_gradients(
    _grad_losses: Tensor,
    hidden: Tensor,
    weight: Tensor,
    _targets: Tensor,
    _statistics: Tensor,
    _logits: Tensor,
    _size: int,
    of_hidden: bool,
    of_weight: bool,
) -> tuple[Tensor, Tensor]:
    return empty(hidden, hidden.dtype, of_hidden), empty(weight, weight.dtype, of_weight)


# --- autograd


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, targets, ctx.size, keep, ranked = inputs
    _, ranks, statistics, logits = output
    # Saved tensors make autograd refuse a second backward once the first one has overwritten kept logits.
    ctx.save_for_backward(hidden, weight, targets, statistics, *((logits,) if keep and not ranked else ()))
    ctx.mark_non_differentiable(ranks, statistics, logits)
    ctx.set_materialize_grads(False)  # materialized zeros would be as large as the logits


def _backward(ctx: Any, grad_losses: Tensor | None, *_others: None) -> tuple[Tensor | None, ...]:
    found: tuple[Tensor | None, ...] = (None, None)
    if grad_losses is not None:
        hidden, weight, targets, statistics, *kept = ctx.saved_tensors
        logits = kept[0] if kept else _space(hidden, weight, ctx.size, wanted=False)
        wants = ctx.needs_input_grad[:2]
        asked = ctx.size, *wants
        found = only(wants, gradients_by_words(grad_losses, hidden, weight, targets, statistics, logits, *asked))
    return *found, None, None, None, None


token_losses_by_words.register_autograd(_backward, setup_context=_keep)


# --- helpers of the operators


def _even(words: int, size: int) -> int:
    """Chunk size W for V vocabulary entries: chunks of equal size instead of large chunks and a tiny one."""
    if size >= words:
        return words
    even = -(-words // -(-words // size))
    return min(-(-even // TILE) * TILE, size)


def _chunks(words: int, size: int) -> list[slice]:
    """Slices of the vocabulary, one for each chunk."""
    size = _even(words, size)
    return [slice(start, min(start + size, words)) for start in range(0, words, size)]


def _space(hidden: Tensor, weight: Tensor, size: int, *, wanted: bool) -> Tensor:
    """Uninitialized memory for the logits [T, P] of a chunk; no rows unless ``wanted``."""
    tokens = hidden.shape[:-1].numel() if wanted else 0
    return hidden.new_empty(tokens, columns(_even(weight.shape[0], size)))


def _check_words(weight: Tensor, words: Tensor) -> None:
    """Check the targets with a gather: an error on the CPU, an assertion on the device. Kernels do not check them."""
    weight.select(1, 0).gather(0, words.masked_fill(words == IGNORE, 0))


def _project(tokens: Tensor, weight: Tensor, chunk: slice, space: Tensor) -> Tensor:
    """Compute the logits of a chunk; a second call has the same shapes and strides, and so gives the same bits."""
    torch.mm(tokens, weight[chunk].t(), out=space[:, : chunk.stop - chunk.start])
    return space


def _facts(chunk: slice) -> dict[str, int]:
    return {"words": chunk.stop - chunk.start, "ignored": IGNORE}
