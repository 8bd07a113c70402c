"""Kernel of sums of columns, see :mod:`d9d_triton.column_sums`."""

from __future__ import annotations

import triton
import triton.language as tl

from d9d_triton.launcher import Launcher


@Launcher
@triton.jit
def add_up(out, matrix, rows, columns, ROWS: tl.constexpr, BLOCKS: tl.constexpr, COLUMNS: tl.constexpr):
    """Column-sum kernel: sums of a block of columns of a matrix.

    Args:
        out: [C], out, of any dtype.
        matrix: float32 [R, C].
        rows: R.
        columns: C.
        ROWS: rows that are added in parallel.
        BLOCKS: R / ROWS, rounded up.
        COLUMNS: columns of one program.
    """
    _add_up(out, matrix, rows, columns, ROWS, BLOCKS, COLUMNS)


@Launcher
@triton.jit
def add_up_both(
    out,
    other_out,
    matrix,
    rows,
    other_rows,
    columns,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Column-sum kernel: sums of a block of columns of one of two matrices, which are adjacent in memory.

    Args:
        out: [C], out, of any dtype: sums of the first matrix.
        other_out: [C], out, of any dtype: sums of the second matrix.
        matrix: float32 [R + S, C].
        rows: R.
        other_rows: S.
        columns: C.
        ROWS: rows that are added in parallel.
        BLOCKS: max(R, S) / ROWS, rounded up.
        COLUMNS: columns of one program.
    """
    if tl.program_id(1) == 0:
        _add_up(out, matrix, rows, columns, ROWS, BLOCKS, COLUMNS)
    else:
        _add_up(
            other_out,
            matrix + tl.program_id(1).to(tl.int64) * rows * columns,
            other_rows,
            columns,
            ROWS,
            BLOCKS,
            COLUMNS,
        )


@triton.jit
def _add_up(out, matrix, rows, columns, ROWS: tl.constexpr, BLOCKS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sums of a block of columns of a matrix, see :func:`add_up`."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    # Unrolled, so that the loads overlap.
    for block in tl.static_range(BLOCKS):
        row = block * ROWS + tl.arange(0, ROWS)[:, None]
        place = matrix + row.to(tl.int64) * columns + column
        total += tl.load(place, (row < rows) & (column < columns), other=0.0)
    columns_out = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    tl.store(out + columns_out, tl.sum(total, axis=0).to(out.dtype.element_ty), columns_out < columns)
