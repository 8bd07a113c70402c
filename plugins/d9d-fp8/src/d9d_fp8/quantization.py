"""Quantisation to float8 with scales that are computed from the values (dynamic scaling).

Shapes: M rows, K features; the product that follows sums over K.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor

#: Side of the blocks of :attr:`Granularity.TILE` and :attr:`Granularity.SQUARE`.
BLOCK = 128
#: Lower bound of the maximum that a scale is computed from: for smaller maxima, e5m2's scale or its inverse is outside
#: of float32's range.
_SMALLEST = 1e-30
#: Float dtype -> integer dtype of the same width. The bits of non-negative floats, read as integers, have the order of
#: the floats; NaN is the largest.
_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
_EXPONENT = 0x7F800000


class Granularity(StrEnum):
    """Granularity of scales: which values of a matrix share a scale."""

    TENSOR = "tensor"  # all values
    ROW = "row"  # all K values of a row
    TILE = "1x128"  # 128 values of a row
    SQUARE = "128x128"  # 128 values of each of 128 rows


class Operand(NamedTuple):
    """Format of one operand of a product.

    Attributes:
        granularity: values that share a scale.
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        power_of_two: whether to round scales up to powers of two, so that scaling itself is exact.
    """

    granularity: Granularity
    dtype: torch.dtype = torch.float8_e4m3fn
    power_of_two: bool = False


class Quantized(NamedTuple):
    """Quantised matrix: ``data * scale`` approximates the original.

    Stacked expert weights have row scales, and the experts as an additional leading dimension of data and scale.

    Attributes:
        data: float8 [M, K], contiguous.
        scale: float32: [1, 1], [M, 1], [M, K / 128] or [M / 128, K / 128], see :class:`Granularity`.
    """

    data: Tensor
    scale: Tensor


def quantize(matrix: Tensor, operand: Operand) -> Quantized:
    """Quantise a matrix so that the largest magnitude among values that share a scale becomes the format's largest.

    With ``operand.power_of_two``, this magnitude becomes more than half of the format's largest number.

    A NaN or an infinity becomes NaN in the result, and may turn all values that share its scale into NaN, so that it
    stays visible.

    Args:
        matrix: [M, K], or for row scales [E, M, K], of any strides; float32, bfloat16 or float16. M and K must be
            multiples of the sizes that the granularity needs.
        operand: format of the result.
    """
    parts, dims = _parts(matrix, operand.granularity)
    largest = _largest(parts, dims)
    # No clamping: a scaled value exceeds the format's largest number only by a rounding error.
    factor = torch.finfo(operand.dtype).max / torch.where(largest < _SMALLEST, _SMALLEST, largest)
    if operand.power_of_two:
        factor = (factor.view(torch.int32) & _EXPONENT).view(torch.float32)
    data = (parts.float() * factor).to(operand.dtype).reshape(matrix.shape).contiguous()
    return Quantized(data, _reshape(factor.reciprocal(), operand.granularity))


def dequantize(quantized: Quantized) -> Tensor:
    """Float32 matrix [M, K] that a quantised matrix represents."""
    scale = quantized.scale
    for dim, size in enumerate(quantized.data.shape):
        if scale.shape[dim] not in (1, size):
            scale = scale.repeat_interleave(BLOCK, dim)
    # A dim of the scales with size one is not repeated, because it broadcasts.
    return quantized.data.float() * scale


def _parts(matrix: Tensor, granularity: Granularity) -> tuple[Tensor, tuple[int, ...]]:
    """View of the matrix, and its dims over which values share a scale."""
    if granularity is Granularity.TENSOR:
        return matrix, (0, 1)
    if granularity is Granularity.ROW:
        return matrix, (-1,)
    m, k = matrix.shape
    if granularity is Granularity.TILE:
        return matrix.reshape(m, k // BLOCK, BLOCK), (2,)
    return matrix.reshape(m // BLOCK, BLOCK, k // BLOCK, BLOCK), (1, 3)


def _largest(parts: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Largest magnitude over the given dimensions, float32; reduced dimensions keep size 1.

    Magnitudes are compared as integers, with the same result: Triton 3.8 stores garbage in transposed float8 matrices
    if the same kernel takes a maximum of floats that propagates NaN (triton-lang/triton#11111).
    """
    bits = parts.abs().view(_BITS[parts.dtype])
    return bits.amax(dims, keepdim=True).view(parts.dtype).float()


def _reshape(scale: Tensor, granularity: Granularity) -> Tensor:
    if granularity is Granularity.TILE:
        return scale.squeeze(2)
    return scale.squeeze(3).squeeze(1) if granularity is Granularity.SQUARE else scale
