"""Helpers of the loss operators: memory for outputs, chunks of tokens, products, and passes over logits.

Shapes: T tokens, C tokens of a chunk, H features, V vocabulary size, P columns of logits in memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from d9d_nn.ops.linear_cross_entropy import IGNORE
from torch import Tensor

from d9d_triton.linear_cross_entropy.passes import columns, gradient_in_place, row_statistics

#: Height of a matrix product's tile in tokens; larger chunks have a multiple of it.
_TILE = 64


def results(hidden: Tensor, targets: Tensor, ranked: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Uninitialized memory for losses, numbers of logits above the target's (if ``ranked``), and softmax statistics."""
    losses = torch.empty(targets.shape, dtype=torch.float32, device=hidden.device)
    ranks = torch.empty(targets.shape if ranked else 0, dtype=torch.int64, device=hidden.device)
    return losses, ranks, losses.new_empty(2, targets.numel())


def empty(like: Tensor, dtype: torch.dtype, wanted: bool) -> Tensor:
    """Uninitialized memory for a gradient; empty if the gradient is not needed."""
    return torch.empty(like.shape if wanted else 0, dtype=dtype, device=like.device)


def without_ignored(hidden: Tensor, targets: Tensor, wanted: bool) -> Tensor:
    """Hidden states [T, H] with ignored tokens set to zero, because zero times NaN would spoil the weight gradient."""
    if not wanted:
        return hidden
    return hidden.masked_fill((targets == IGNORE).unsqueeze(-1), 0).flatten(0, -2)


def space_for(rows: int, hidden: Tensor, weight: Tensor) -> Tensor:
    """Uninitialized memory for the logits [rows, P] of a chunk."""
    return hidden.new_empty(rows, columns(weight.shape[0]))


def parts_of(tokens: int, kept: Tensor, rows: int, tile: int = _TILE) -> list[tuple[slice, Tensor]]:
    """Chunks of tokens with memory for their logits; chunks whose logits are not kept share one buffer.

    Args:
        tokens: T.
        kept: memory for the logits of the first K tokens [K, P], which form one chunk.
        rows: largest size of another chunk, in tokens.
        tile: a chunk with more tokens than ``tile`` is rounded up to a multiple of ``tile``.
    """
    parts = [(slice(0, len(kept)), kept)] if len(kept) else []
    rest = tokens - len(kept)
    even = -(-rest // max(1, -(-rest // rows)))  # chunks of equal size instead of large ones and a tiny one
    rows = min(rows, -(-even // tile) * tile)
    shared = kept.new_empty(min(rows, rest), kept.shape[1])
    for start in range(len(kept), tokens, max(1, rows)):
        stop = min(start + rows, tokens)
        parts.append((slice(start, stop), shared[: stop - start]))
    return parts


def project(tokens: Tensor, weight: Tensor, space: Tensor) -> None:
    """Write the logits of a chunk into ``space``."""
    torch.mm(tokens, weight.t(), out=space[:, : len(weight)])


def read(
    space: Tensor, part: slice, words: int, targets: Tensor, losses: Tensor, ranks: Tensor, statistics: Tensor
) -> None:
    """Fill losses, ranks and statistics of a chunk from its logits."""
    targets = targets.flatten()[part].contiguous()
    # gather checks the index: an error on the CPU, an assertion on the device. The kernels never index with a target.
    own = space[:, :words].gather(1, targets.masked_fill(targets == IGNORE, 0).unsqueeze(1)).squeeze(1)
    counts = ranks.view(-1)[part] if ranks.numel() else None
    row_statistics(space, own, targets, losses.view(-1)[part], statistics[:, part], counts, words=words, ignored=IGNORE)


def read_and_differentiate(
    space: Tensor, part: slice, words: int, targets: Tensor, losses: Tensor, ranks: Tensor, statistics: Tensor
) -> Tensor:
    """Fill losses, ranks and statistics of a chunk; overwrite its logits with the gradient [C, V] of the loss sum."""
    read(space, part, words, targets, losses, ranks, statistics)
    return differentiate(space, part, words, targets, statistics, losses.new_ones(()).expand(losses.numel()))


def differentiate(
    space: Tensor, part: slice, words: int, targets: Tensor, statistics: Tensor, grad_losses: Tensor
) -> Tensor:
    """Overwrite a chunk's logits with their gradient [C, V], and return it."""
    targets, grads = (tensor.flatten()[part].contiguous() for tensor in (targets, grad_losses))
    gradient_in_place(space, targets, statistics[:, part], grads, words=words, ignored=IGNORE)
    return space[:, :words]


def add_product(total: Tensor | None, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``total + a @ b`` in ``dtype``, which may be wider than the operands; in place if ``total`` is given."""
    if dtype == a.dtype:
        return a @ b if total is None else torch.addmm(total, a, b, out=total)
    if a.is_cuda:  # cuBLAS accumulates into the wide dtype
        if total is None:
            return torch.mm(a, b, out_dtype=dtype)
        return torch.addmm(total, a, b, out_dtype=dtype, out=total)
    product = (a @ b).to(dtype)
    return product if total is None else total.add_(product)


def total_of(total: Tensor | None, weight: Tensor, wanted: bool) -> Tensor:
    """Weight gradient after all chunks: zeros if there was no chunk, empty if it is not needed."""
    if total is not None:
        return total
    return torch.zeros_like(weight) if wanted else weight.new_empty(0)


def only(wants: Sequence[bool], found: tuple[Tensor, Tensor]) -> tuple[Tensor | None, ...]:
    """Gradients of hidden states and weight, with ``None`` where autograd needs no gradient."""
    return tuple(grad if wanted else None for grad, wanted in zip(found, wants, strict=True))


def is_one_number(tensor: Tensor) -> bool:
    """Whether all elements share one memory location, as in the gradient of a sum; known without a device sync."""
    return all(size <= 1 or stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
