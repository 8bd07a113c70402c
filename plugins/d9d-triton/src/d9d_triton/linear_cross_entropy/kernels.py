"""Passes over logits: the statistics of each row, and the gradient in the place of the logits.

Shapes: C rows, V words, P columns of a row in memory: V, and maybe some that nobody reads.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Columns in memory are a multiple of this, so that every row begins where wide loads may, whatever V is.
_COLUMNS = 16
#: Logits that a program handles at once.
_BLOCK = 8192
#: Options of the compiler. Triton's default for the fusion of multiplications and additions depends on its version.
_OPTIONS = {"num_warps": 8, "enable_fp_fusion": True}
#: Blocks of a row whose gradient one program computes, one after the other.
_BLOCKS = 4
#: Neighbours in memory that one thread handles: 16 bytes of bfloat16.
_LANE = tl.constexpr(8)
_LOG2E = tl.constexpr(1.4426950408889634)
#: Where maxima begin: finite, also times log2(e), because minus infinity less itself is no number.
_LOWEST = tl.constexpr(-2e38)


def columns(words: int) -> int:
    """P for V words."""
    return (words + _COLUMNS - 1) // _COLUMNS * _COLUMNS


def row_statistics(
    logits: Tensor,
    own: Tensor,
    targets: Tensor,
    losses: Tensor,
    statistics: Tensor,
    ranks: Tensor | None,
    *,
    words: int,
    ignored: int,
) -> None:
    """Compute the loss of each row, what its gradient needs, and maybe the rank of its target. Reads logits once.

    Args:
        logits: [C, P].
        own: logit of the target, [C].
        targets: int64 [C].
        losses: receives the loss, float32 [C]; zero where the target is ``ignored``.
        statistics: receives the largest logit of each row and the sum of the exponentials of what all are above it,
            float32 [2, C].
        ranks: receives how many logits are not at most ``own``, int64 [C]; -1 where the target is ``ignored``.
        words: V.
        ignored: target of rows that are left out.
    """
    with _on_device(logits):
        _take_statistics[(len(logits),)](
            logits,
            own,
            targets,
            losses,
            statistics[0],
            statistics[1],
            targets if ranks is None else ranks,
            ignored,
            RANKED=ranks is not None,
            WORDS=words,
            STRIDE=logits.stride(0),
            BLOCK=_block(words),
            **_OPTIONS,
        )


def gradient_in_place(
    logits: Tensor, targets: Tensor, statistics: Tensor, grad_losses: Tensor, *, words: int, ignored: int
) -> None:
    """Overwrite logits with ``(softmax(logits) - onehot(target)) * grad_loss``. Reads and writes them once.

    Args:
        logits: [C, P].
        targets: int64 [C]; rows whose target is ``ignored`` become zeros, whatever is in them.
        statistics: float32 [2, C] of :func:`row_statistics`.
        grad_losses: gradient of the loss of each row, float32 [C].
        words: V.
        ignored: target of rows that are left out.
    """
    block = _block(words)
    sections = triton.cdiv(words, block * _BLOCKS)
    with _on_device(logits):
        _differentiate[(len(logits) * sections,)](
            logits,
            targets,
            statistics[0],
            statistics[1],
            grad_losses,
            sections,
            ignored,
            WORDS=words,
            STRIDE=logits.stride(0),
            BLOCK=block,
            BLOCKS=_BLOCKS,
            **_OPTIONS,
        )


def _block(words: int) -> int:
    block: int = triton.next_power_of_2(words)
    return min(_BLOCK, max(_COLUMNS, block))


def _on_device(tensor: Tensor) -> AbstractContextManager[Any]:
    """Context in which launches go to the GPU of the tensor; Triton launches on the current one."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


# A chunk begins where it begins: without this, each alignment of its rows' numbers would be a kernel of its own.
@triton.jit(do_not_specialize_on_alignment=["own", "targets", "losses", "peaks", "totals", "ranks"])
def _take_statistics(
    logits: tl.tensor,
    own: tl.tensor,
    targets: tl.tensor,
    losses: tl.tensor,
    peaks: tl.tensor,
    totals: tl.tensor,
    ranks: tl.tensor,
    ignored: int,
    RANKED: tl.constexpr,
    WORDS: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Statistics of one row per program. Each lane has a maximum and a sum of its own; they meet at the end."""
    row = tl.program_id(0)
    logits += row.to(tl.int64) * STRIDE
    if tl.load(targets + row) == ignored:
        tl.store(losses + row, 0.0)
        tl.store(peaks + row, 0.0)
        tl.store(totals + row, 1.0)
        if RANKED:
            tl.store(ranks + row, -1)
    else:
        target = tl.load(own + row).to(tl.float32)
        offsets = tl.arange(0, BLOCK // _LANE)[:, None] * _LANE + tl.arange(0, _LANE)[None, :]
        peak = tl.full((BLOCK // _LANE,), _LOWEST, tl.float32)
        total = tl.zeros((BLOCK // _LANE,), tl.float32)
        above = tl.zeros((BLOCK // _LANE,), tl.int32)
        for start in range(0, WORDS // BLOCK * BLOCK, BLOCK):
            x = tl.load(logits + start + offsets).to(tl.float32)
            peak, total = _include(x, peak, total)
            if RANKED:
                above += tl.sum(tl.where(x <= target, 0, 1), 1)
        if WORDS % BLOCK:
            column = WORDS // BLOCK * BLOCK + offsets
            x = tl.load(logits + column, mask=column < WORDS, other=float("-inf")).to(tl.float32)
            peak, total = _include(x, peak, total)
            if RANKED:
                # If the target's logit is NaN, no comparison holds, not even of what is outside.
                above += tl.sum(tl.where((x <= target) | (column >= WORDS), 0, 1), 1)
        largest = tl.max(peak, 0)
        total = tl.sum(total * tl.exp2((peak - largest) * _LOG2E), 0)
        # Not by their sum, log-sum-exp, which has fewer bits for what is behind the point.
        tl.store(losses + row, tl.log(total) + (largest - target))
        tl.store(peaks + row, largest)
        tl.store(totals + row, total)
        if RANKED:
            tl.store(ranks + row, tl.sum(above, 0).to(tl.int64))


@triton.jit
def _include(x: tl.tensor, peak: tl.tensor, total: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Maxima [R] and sums of exponentials [R] of lanes, with R x 8 further logits."""
    larger = tl.maximum(peak, tl.max(x, 1))
    # exp2 is one instruction; exp has three more, for results that are too small to matter.
    terms = tl.exp2((x - larger[:, None]) * _LOG2E)
    return larger, total * tl.exp2((peak - larger) * _LOG2E) + tl.sum(terms, 1)


@triton.jit(do_not_specialize_on_alignment=["targets", "peaks", "totals", "grad_losses"])
def _differentiate(
    logits: tl.tensor,
    targets: tl.tensor,
    peaks: tl.tensor,
    totals: tl.tensor,
    grad_losses: tl.tensor,
    sections: int,
    ignored: int,
    WORDS: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """Gradient of one section of a row per program."""
    row = tl.program_id(0) // sections
    first = tl.program_id(0) % sections * (BLOCK * BLOCKS)
    logits += row.to(tl.int64) * STRIDE
    target = tl.load(targets + row).to(tl.int32)
    if target == ignored:
        for index in range(BLOCKS):
            column = first + index * BLOCK + tl.arange(0, BLOCK)
            tl.store(logits + column, tl.zeros((BLOCK,), logits.dtype.element_ty), mask=column < STRIDE)
    else:
        grad_loss = tl.load(grad_losses + row)
        peak = tl.load(peaks + row)
        scale = 1.0 / tl.load(totals + row)
        for index in range(BLOCKS):
            column = first + index * BLOCK + tl.arange(0, BLOCK)
            # To the end of the row in memory, so that accesses are wide; what is behind the last word is nobody's.
            x = tl.load(logits + column, mask=column < STRIDE, other=0.0).to(tl.float32)
            p = tl.exp2((tl.where(column < WORDS, x, peak) - peak) * _LOG2E) * scale
            grad = tl.where(column == target, p - 1.0, p) * grad_loss
            tl.store(logits + column, grad.to(logits.dtype.element_ty), mask=column < STRIDE)
