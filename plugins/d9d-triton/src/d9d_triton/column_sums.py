"""Sums of the columns of a matrix, in a fixed order."""

from __future__ import annotations

import torch
from torch import Tensor

from d9d_triton.kernels.column_sums import add_up, add_up_both
from d9d_triton.launch import OPTIONS, cdiv

#: Number of rows that a program adds in parallel, and number of its columns: few columns, so that there are enough
#: programs for all multiprocessors.
_ROWS, _COLUMNS = 128, 16


def column_sums(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum each column in float32; round the result once.

    Args:
        matrix: float32 [R, C], contiguous.
        dtype: dtype of the sums.

    Returns:
        [C].
    """
    rows, columns = matrix.shape
    out = torch.empty(columns, dtype=dtype, device=matrix.device)
    blocks = cdiv(rows, _ROWS)
    add_up[(cdiv(columns, _COLUMNS),)](
        out, matrix, rows, columns, ROWS=_ROWS, BLOCKS=blocks, COLUMNS=_COLUMNS, **OPTIONS
    )
    return out


def sums_of_two(matrix: Tensor, rows: int, dtypes: tuple[torch.dtype, torch.dtype]) -> tuple[Tensor, Tensor]:
    """Sum each column of two matrices in one launch; the same bits as two calls of :func:`column_sums`.

    Args:
        matrix: float32 [R, C], contiguous: the rows of the first matrix, then the rows of the second one.
        rows: number of rows of the first matrix.
        dtypes: dtypes of the sums of both.

    Returns:
        [C] and [C].
    """
    count, columns = matrix.shape
    first, second = (torch.empty(columns, dtype=dtype, device=matrix.device) for dtype in dtypes)
    blocks = cdiv(max(rows, count - rows), _ROWS)
    add_up_both[(cdiv(columns, _COLUMNS), 2)](
        first, second, matrix, rows, count - rows, columns, ROWS=_ROWS, BLOCKS=blocks, COLUMNS=_COLUMNS, **OPTIONS
    )
    return first, second
