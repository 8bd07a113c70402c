"""Kernel of sums of columns, see :mod:`d9d_triton.column_sums`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_up(out, matrix, rows, columns, ROWS: tl.constexpr, BLOCKS: tl.constexpr, COLUMNS: tl.constexpr):
    """Column-sum kernel: sums of some columns of a matrix.

    Args:
        out: [C], out, of any dtype.
        matrix: float32 [R, C].
        rows: R.
        columns: C.
        ROWS: rows that are added up side by side.
        BLOCKS: R over that, rounded up.
        COLUMNS: columns of a program.
    """
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    # Unrolled, so that no load waits for the one before.
    for block in tl.static_range(BLOCKS):
        row = block * ROWS + tl.arange(0, ROWS)[:, None]
        place = matrix + row.to(tl.int64) * columns + column
        total += tl.load(place, (row < rows) & (column < columns), other=0.0)
    columns_out = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    tl.store(out + columns_out, tl.sum(total, axis=0).to(out.dtype.element_ty), columns_out < columns)
