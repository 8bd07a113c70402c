"""Kernels of linear cross-entropy, see :mod:`d9d_triton.linear_cross_entropy.passes`.

Shapes: C rows, V vocabulary size (of the whole vocabulary or of a chunk), P columns of a row in memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from d9d_triton.launcher import Launcher

#: Consecutive elements that one thread handles: 16 bytes of bfloat16.
_LANE = tl.constexpr(8)
_LOG2E = tl.constexpr(1.4426950408889634)
#: Initial value of a maximum: finite, even after multiplication by log2(e), because -inf - (-inf) would be NaN.
_LOWEST = tl.constexpr(-2e38)


# The slices of a chunk begin at any address; without the argument, Triton would compile a kernel for each alignment.
@Launcher
@triton.jit(do_not_specialize_on_alignment=["own", "targets", "losses", "peaks", "totals", "ranks"])
def take_statistics(
    logits,
    own,
    targets,
    losses,
    peaks,
    totals,
    ranks,
    ignored,
    RANKED: tl.constexpr,
    WORDS: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Cross-entropy kernel: loss and softmax statistics of rows of logits; a program handles one row.

    Each thread keeps statistics of its own columns; they are merged at the end.

    Args:
        logits: [C, P].
        own: logit of the target, [C].
        targets: int64 [C].
        losses: float32 [C], out.
        peaks: float32 [C], out: largest logit.
        totals: float32 [C], out: sum of ``exp(logit - largest)``.
        ranks: int64 [C], out: number of logits greater than the target's logit (NaN included).
        ignored: target index of rows that are left out.
        RANKED: whether to compute ``ranks``.
        WORDS: V.
        STRIDE: P.
        BLOCK: number of logits of one iteration.
    """
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
                # If the target's logit is NaN, no comparison is true, so columns outside of the row are excluded
                # explicitly.
                above += tl.sum(tl.where((x <= target) | (column >= WORDS), 0, 1), 1)
        largest = tl.max(peak, 0)
        total = tl.sum(total * tl.exp2((peak - largest) * _LOG2E), 0)
        # Not as log-sum-exp minus the target's logit: both are large, so their difference would lose fractional bits.
        tl.store(losses + row, tl.log(total) + (largest - target))
        tl.store(peaks + row, largest)
        tl.store(totals + row, total)
        if RANKED:
            tl.store(ranks + row, tl.sum(above, 0).to(tl.int64))


@triton.jit
def _include(x, peak, total):
    """Update the maxima [R] and sums of exponentials [R] of R threads with 8 further logits for each thread."""
    larger = tl.maximum(peak, tl.max(x, 1))
    # exp2 is one instruction; exp takes three more, and differs only in the smallest results.
    terms = tl.exp2((x - larger[:, None]) * _LOG2E)
    return larger, total * tl.exp2((peak - larger) * _LOG2E) + tl.sum(terms, 1)


# ``first`` differs for each chunk, so Triton must not compile a kernel for its value, not even for 0 or 1.
@Launcher
@triton.jit(do_not_specialize=["first"])
def include_words(
    logits,
    targets,
    own,
    peaks,
    totals,
    first,
    ignored,
    WORDS: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Cross-entropy kernel: add a chunk of the vocabulary to the softmax statistics, one row per program.

    Args:
        logits: [C, P].
        targets: int64 [C].
        own: float32 [C], in and out: logit of the target; written only if the target is in this chunk.
        peaks: float32 [C], in and out: largest logit; ``_LOWEST`` before the first chunk.
        totals: float32 [C], in and out: sum of ``exp(logit - largest)``; 0 before the first chunk.
        first: vocabulary index of the chunk's first logit.
        ignored: target index of rows that are left out.
        WORDS: V.
        STRIDE: P.
        BLOCK: logits of one iteration.
    """
    row = tl.program_id(0)
    logits += row.to(tl.int64) * STRIDE
    target = tl.load(targets + row)
    if target == ignored:
        tl.store(peaks + row, 0.0)
        tl.store(totals + row, 1.0)
    else:
        offsets = tl.arange(0, BLOCK // _LANE)[:, None] * _LANE + tl.arange(0, _LANE)[None, :]
        peak = tl.full((BLOCK // _LANE,), _LOWEST, tl.float32)
        total = tl.zeros((BLOCK // _LANE,), tl.float32)
        for start in range(0, WORDS // BLOCK * BLOCK, BLOCK):
            x = tl.load(logits + start + offsets).to(tl.float32)
            peak, total = _include(x, peak, total)
        if WORDS % BLOCK:
            column = WORDS // BLOCK * BLOCK + offsets
            x = tl.load(logits + column, mask=column < WORDS, other=float("-inf")).to(tl.float32)
            peak, total = _include(x, peak, total)
        before = tl.load(peaks + row)
        largest = tl.maximum(before, tl.max(peak, 0))
        total = tl.sum(total * tl.exp2((peak - largest) * _LOG2E), 0)
        total += tl.load(totals + row) * tl.exp2((before - largest) * _LOG2E)
        column = target - first
        inside = (column >= 0) & (column < WORDS)
        found = tl.load(logits + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(own + row, found, mask=inside)
        tl.store(peaks + row, largest)
        tl.store(totals + row, total)


@Launcher
@triton.jit
def count_above(logits, targets, own, ranks, ignored, WORDS: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Cross-entropy kernel: add the number of a chunk's logits above the target's to ``ranks``, one row per program.

    Args:
        logits: [C, P].
        targets: int64 [C].
        own: logit of the target, float32 [C].
        ranks: int64 [C], in and out: number of logits greater than the target's logit (NaN included); 0 at first.
        ignored: target index of rows whose rank becomes -1.
        WORDS: V.
        STRIDE: P.
        BLOCK: logits of one iteration.
    """
    row = tl.program_id(0)
    logits += row.to(tl.int64) * STRIDE
    if tl.load(targets + row) == ignored:
        tl.store(ranks + row, -1)
    else:
        target = tl.load(own + row)
        offsets = tl.arange(0, BLOCK // _LANE)[:, None] * _LANE + tl.arange(0, _LANE)[None, :]
        above = tl.zeros((BLOCK // _LANE,), tl.int32)
        for start in range(0, WORDS // BLOCK * BLOCK, BLOCK):
            x = tl.load(logits + start + offsets).to(tl.float32)
            above += tl.sum(tl.where(x <= target, 0, 1), 1)
        if WORDS % BLOCK:
            column = WORDS // BLOCK * BLOCK + offsets
            x = tl.load(logits + column, mask=column < WORDS, other=float("-inf")).to(tl.float32)
            # If the target's logit is NaN, no comparison is true, so columns outside of the row are excluded
            # explicitly.
            above += tl.sum(tl.where((x <= target) | (column >= WORDS), 0, 1), 1)
        tl.store(ranks + row, tl.load(ranks + row) + tl.sum(above, 0).to(tl.int64))


@Launcher
@triton.jit(do_not_specialize=["first"], do_not_specialize_on_alignment=["targets", "peaks", "totals", "grad_losses"])
def differentiate(
    logits,
    targets,
    peaks,
    totals,
    grad_losses,
    sections,
    first,
    ignored,
    WORDS: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Cross-entropy kernel: overwrite one section of a row of logits with its gradient, one section per program.

    Args:
        logits: [C, P], in and out.
        targets: int64 [C].
        peaks: float32 [C] of :func:`take_statistics`.
        totals: float32 [C] of :func:`take_statistics`.
        grad_losses: float32 [C].
        sections: number of sections of a row.
        first: vocabulary index of the chunk's first logit.
        ignored: target index of rows whose gradient is zero.
        WORDS: V.
        STRIDE: P.
        BLOCK: logits of one iteration.
        BLOCKS: blocks of a section.
    """
    row = tl.program_id(0) // sections
    begin = tl.program_id(0) % sections * (BLOCK * BLOCKS)
    logits += row.to(tl.int64) * STRIDE
    target = tl.load(targets + row).to(tl.int32)
    if target == ignored:
        for index in range(BLOCKS):
            column = begin + index * BLOCK + tl.arange(0, BLOCK)
            tl.store(logits + column, tl.zeros((BLOCK,), logits.dtype.element_ty), mask=column < STRIDE)
    else:
        target -= first
        grad_loss = tl.load(grad_losses + row)
        peak = tl.load(peaks + row)
        scale = 1.0 / tl.load(totals + row)
        for index in range(BLOCKS):
            column = begin + index * BLOCK + tl.arange(0, BLOCK)
            # Covers the row's padding columns too, so that accesses are vectorized; no reader uses the padding.
            x = tl.load(logits + column, mask=column < STRIDE, other=0.0).to(tl.float32)
            p = tl.exp2((tl.where(column < WORDS, x, peak) - peak) * _LOG2E) * scale
            grad = tl.where(column == target, p - 1.0, p) * grad_loss
            tl.store(logits + column, grad.to(logits.dtype.element_ty), mask=column < STRIDE)
