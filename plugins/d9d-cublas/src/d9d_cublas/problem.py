"""Descriptions of products and of algorithms.

Shapes: T rows, N features out, K features in. All tensors are row-major.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: Layout -> whether its first and second operands are transposed.
#: ``forward``: x [T, K] @ weight [N, K].T; ``rows_gradient``: grad [T, N] @ weight [N, K];
#: ``weight_gradient``: grad [T, N].T @ x [T, K].
LAYOUTS = {"forward": (False, True), "rows_gradient": (False, False), "weight_gradient": (True, False)}
#: Dtypes of operands and results; sums are float32.
FLOATS = (torch.bfloat16, torch.float16)
#: Alignment of rows and tensors, in bytes.
ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a cuBLASLt algorithm, as numbers of the header ``cublasLt.h``.

    Attributes:
        id: number of the algorithm.
        tile: ``cublasLtMatmulTile_t``.
        stages: ``cublasLtMatmulStages_t``.
        cluster: ``cublasLtClusterShape_t``.
        custom: number of the custom option.
        swizzle: swizzling of thread blocks.
        split_k: number of partial sums into which the sum over K is split.
        reduction: ``cublasLtReductionScheme_t``, how the partial sums are added.
        inner: ``cublasLtMatmulInnerShape_t``.
    """

    id: int
    tile: int = 0
    stages: int = 0
    cluster: int = 0
    custom: int = 0
    swizzle: int = 0
    split_k: int = 1
    reduction: int = 0
    inner: int = 0


@dataclass(frozen=True, slots=True)
class Problem:
    """Matrix product for which an algorithm is chosen.

    Attributes:
        layout: one of :data:`LAYOUTS`.
        rows: T.
        out_features: N.
        in_features: K.
        dtype: dtype of operands and result, for example ``bfloat16``.
    """

    layout: str
    rows: int
    out_features: int
    in_features: int
    dtype: str

    @classmethod
    def of(cls, layout: str, first: Tensor, second: Tensor) -> Problem:
        """Problem for two operands in a layout of :data:`LAYOUTS`."""
        rows, features = first.shape
        wide = second.shape[1]
        out_features = second.shape[0] if layout == "forward" else features
        return cls(layout, rows, out_features, wide, str(first.dtype).removeprefix("torch."))

    @property
    def operations(self) -> int:
        """Number of floating-point operations of the product."""
        return 2 * self.rows * self.out_features * self.in_features


def stored_shapes(problem: Problem) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    """Shapes of both operands and of the result, as stored in memory."""
    x, weight, grad = (
        (problem.rows, problem.in_features),
        (problem.out_features, problem.in_features),
        (problem.rows, problem.out_features),
    )
    return {"forward": (x, weight, grad), "rows_gradient": (grad, weight, x), "weight_gradient": (grad, x, weight)}[
        problem.layout
    ]


def shape_of(layout: str, first: Tensor, second: Tensor) -> tuple[int, int]:
    """Shape of the result."""
    first_transposed, second_transposed = LAYOUTS[layout]
    return first.shape[int(first_transposed)], second.shape[int(not second_transposed)]


def fits(first: Tensor, second: Tensor) -> bool:
    """Whether the library can multiply two operands: dtype, strides and alignment fit, and neither is empty."""
    return first.dtype == second.dtype and first.dtype in FLOATS and _is_aligned(first) and _is_aligned(second)


def _is_aligned(matrix: Tensor) -> bool:
    per_row = ALIGNMENT // matrix.element_size()
    return (
        matrix.numel() > 0
        and matrix.stride(1) == 1
        and matrix.stride(0) >= matrix.shape[1]
        and matrix.shape[1] % per_row == 0
        and matrix.stride(0) % per_row == 0
        and matrix.data_ptr() % ALIGNMENT == 0
    )


def multiply(layout: str, first: Tensor, second: Tensor, out: Tensor) -> None:
    """Compute a product by torch, with cuBLAS's default algorithm.

    Args:
        layout: one of :data:`LAYOUTS`.
        first: first operand.
        second: second operand.
        out: receives the product.
    """
    first_transposed, second_transposed = LAYOUTS[layout]
    torch.mm(first.T if first_transposed else first, second.T if second_transposed else second, out=out)
