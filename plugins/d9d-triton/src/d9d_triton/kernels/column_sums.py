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
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    # Unrolled, so that the loads overlap.
    for block in tl.static_range(BLOCKS):
        row = block * ROWS + tl.arange(0, ROWS)[:, None]
        place = matrix + row.to(tl.int64) * columns + column
        total += tl.load(place, (row < rows) & (column < columns), other=0.0)
    columns_out = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    tl.store(out + columns_out, tl.sum(total, axis=0).to(out.dtype.element_ty), columns_out < columns)
