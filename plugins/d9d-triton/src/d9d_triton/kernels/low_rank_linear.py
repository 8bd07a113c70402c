"""Kernels of the op ``low_rank_linear``, see :mod:`d9d_triton.low_rank_linear`.

Shapes: T rows, O features of an output, N columns, r rank, P programs along the features, Q programs along the rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from d9d_triton.kernels.gated_delta_rule_parts import multiply
from d9d_triton.launcher import Launcher


@Launcher
@triton.jit
def widen(
    out,
    low,
    matrix,
    bias,
    rows,
    columns,
    rank,
    low_stride,
    rank_stride,
    column_stride,
    scale,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANK: tl.constexpr,
    BIASED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Low-rank kernel: ``scale * low @ matrix``, plus a bias for each column.

    It takes as long as writing the output, which cuBLAS does in 1.1 to 1.3 times this time (rank 16, an H200).

    Args:
        out: [T, N], out.
        low: [T, r] with rows at ``low_stride``.
        matrix: [r, N] with the given strides.
        bias: [N]; unused unless ``BIASED``.
        rows: T.
        columns: N.
        rank: r.
        low_stride: elements between rows of ``low``.
        rank_stride: elements between rows of the matrix.
        column_stride: elements between columns of the matrix.
        scale: factor of the product.
        ROWS: rows of a tile.
        COLUMNS: columns of a tile.
        RANK: r, padded to a power of two of at least 16.
        BIASED: whether there is a bias.
        PRECISION: precision of products of float32 matrices.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    of_rank = tl.arange(0, RANK)
    start = row.to(tl.int64)[:, None]
    narrow = (row < rows)[:, None] & (of_rank < rank)[None, :]
    x = tl.load(low + start * low_stride + of_rank[None, :], narrow, other=0.0)
    inside = (of_rank < rank)[:, None] & (column < columns)[None, :]
    place = of_rank.to(tl.int64)[:, None] * rank_stride + column.to(tl.int64)[None, :] * column_stride
    total = multiply(x, tl.load(matrix + place, inside, other=0.0), PRECISION) * scale
    if BIASED:
        total += tl.load(bias + column, column < columns, other=0.0).to(tl.float32)[None, :]
    known = (row < rows)[:, None] & (column < columns)[None, :]
    tl.store(out + start * columns + column[None, :], total.to(out.dtype.element_ty), known)


@Launcher
@triton.jit
def differentiate_update(
    low_out,
    up_out,
    grad,
    up,
    low,
    rows,
    features,
    rank,
    grad_stride,
    low_stride,
    scale,
    ROWS: tl.constexpr,
    STEPS: tl.constexpr,
    FEATURES: tl.constexpr,
    RANK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradient kernel of a low-rank update: partial gradients of ``x A^T`` and of B in one pass over the gradient.

    A program reads STEPS * ROWS rows and FEATURES features of the gradient.

    Args:
        low_out: float32 [P, T, r], out: gradients of ``x A^T``, to be summed over P.
        up_out: float32 [Q, O, r], out: gradients of B, to be summed over Q.
        grad: [T, O] with rows at ``grad_stride``: gradient of the output.
        up: [O, r], B.
        low: [T, r] with rows at ``low_stride``: ``x A^T``.
        rows: T.
        features: O.
        rank: r.
        grad_stride: elements between rows of ``grad``.
        low_stride: elements between rows of ``low``.
        scale: factor of the update.
        ROWS: rows of a tile.
        STEPS: tiles of a program.
        FEATURES: features of a tile.
        RANK: r, padded to a power of two of at least 16.
        PRECISION: precision of products of float32 matrices.
    """
    block, part = tl.program_id(0), tl.program_id(1)
    feature = part * FEATURES + tl.arange(0, FEATURES)
    of_rank = tl.arange(0, RANK)
    inside = (feature < features)[:, None] & (of_rank < rank)[None, :]
    place = feature.to(tl.int64)[:, None] * rank + of_rank[None, :]
    b = tl.load(up + place, inside, other=0.0)
    total = tl.zeros((FEATURES, RANK), tl.float32)
    for step in range(STEPS):
        row = (block * STEPS + step) * ROWS + tl.arange(0, ROWS)
        start = row.to(tl.int64)[:, None]
        known = (row < rows)[:, None]
        g = tl.load(grad + start * grad_stride + feature[None, :], known & (feature < features)[None, :], other=0.0)
        narrow = known & (of_rank < rank)[None, :]
        x = tl.load(low + start * low_stride + of_rank[None, :], narrow, other=0.0)
        out = low_out + (part.to(tl.int64) * rows + start) * rank + of_rank[None, :]
        tl.store(out, multiply(g, b, PRECISION) * scale, narrow)
        total += multiply(tl.trans(g), x, PRECISION)
    tl.store(up_out + block.to(tl.int64) * features * rank + place, total * scale, inside)


@Launcher
@triton.jit
def add_parts(
    low,
    up,
    low_parts,
    up_parts,
    low_size,
    up_size,
    low_count,
    up_count,
    low_programs,
    rank,
    low_stride,
    BLOCK: tl.constexpr,
):
    """Gradient kernel of a low-rank update, last: sums of the results of :func:`differentiate_update`.

    Args:
        low: [T, r] with rows at ``low_stride``, out, of any dtype.
        up: [O, r], out, contiguous, of any dtype.
        low_parts: float32 [P, T, r].
        up_parts: float32 [Q, O, r].
        low_size: T * r.
        up_size: O * r.
        low_count: P.
        up_count: Q.
        low_programs: number of programs of ``low``, which come first.
        rank: r.
        low_stride: elements between rows of ``low``.
        BLOCK: elements of a program.
    """
    program = tl.program_id(0)
    if program < low_programs:
        place, total = _add_block(low_parts, program, low_size, low_count, BLOCK)
        out = low + place // rank * low_stride + place % rank
        tl.store(out, total.to(low.dtype.element_ty), place < low_size)
    else:
        place, total = _add_block(up_parts, program - low_programs, up_size, up_count, BLOCK)
        tl.store(up + place, total.to(up.dtype.element_ty), place < up_size)


@triton.jit
def _add_block(parts, block, size, count, BLOCK: tl.constexpr):
    """Places of a block of elements, and sums over parts [count, size] in a fixed order."""
    place = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    source = parts + place
    total = tl.zeros((BLOCK,), tl.float32)
    for _ in range(count):
        total += tl.load(source, place < size, other=0.0)
        source += size
    return place, total
