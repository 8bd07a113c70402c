"""Rounding to float8 stays within the format's error, and products within what follows from that."""

from __future__ import annotations

import pytest
import torch
from d9d_fp8.products import scaled_product
from d9d_fp8.quantization import Granularity, Operand, dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
#: Half a unit in the last place, relative; and the smallest number above zero over the largest one.
HALF_ULP = {E4M3: 2**-4, E5M2: 2**-3}
STEP = {E4M3: 2**-9 / 448, E5M2: 2**-16 / 57344}

formats = st.builds(Operand, st.sampled_from(list(Granularity)), st.sampled_from([E4M3, E5M2]), st.booleans())
sizes = st.sampled_from([128, 256])


def values(rows: int, columns: int, spread: float, seed: int, dtype: torch.dtype) -> Tensor:
    """Rows and columns of different magnitudes, and some zeros."""
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(rows, columns, generator=generator)
    for shape in ((rows, 1), (1, columns)):
        matrix *= torch.exp(spread * torch.randn(shape, generator=generator))
    return (matrix * (torch.rand(rows, columns, generator=generator) > 0.1)).to(dtype)


def bound(matrix: Tensor, operand: Operand) -> Tensor:
    """Largest error of each value: half a unit in its last place, or half the smallest number where that is more."""
    exact = matrix.double().abs()
    if operand.granularity is Granularity.TENSOR:
        largest = exact.amax().expand_as(exact)
    elif operand.granularity is Granularity.ROW:
        largest = exact.amax(1, keepdim=True).expand_as(exact)
    else:
        height = 1 if operand.granularity is Granularity.TILE else 128
        blocks = exact.unflatten(1, (-1, 128)).unflatten(0, (-1, height))
        largest = blocks.amax((1, 3), keepdim=True).expand_as(blocks).flatten(2, 3).flatten(0, 1)
    # A scale that was rounded down to a power of two leaves up to half the format's numbers unused.
    smallest = largest * STEP[operand.dtype] * (2 if operand.power_of_two else 1) / 2
    return torch.maximum(exact * HALF_ULP[operand.dtype], smallest) * (1 + 1e-5) + 1e-30


@given(formats, sizes, sizes, st.sampled_from([0.0, 1.0, 4.0]), st.integers(0, 99), st.booleans())
@settings(max_examples=60)
def test_values_are_rounded_within_the_error_of_the_format(operand, rows, columns, spread, seed, narrow) -> None:
    matrix = values(rows, columns, spread, seed, torch.bfloat16 if narrow else torch.float32)
    quantized = quantize(matrix, operand)
    assert quantized.data.dtype == operand.dtype
    assert quantized.data.is_contiguous()
    error = (dequantize(quantized).double() - matrix.double()).abs()
    assert (error <= bound(matrix, operand)).all()
    if operand.power_of_two:
        assert torch.equal(torch.frexp(quantized.scale).mantissa, torch.full_like(quantized.scale, 0.5))


@given(formats, formats, sizes, sizes, st.sampled_from([0.0, 2.0]), st.integers(0, 99))
@settings(max_examples=40)
def test_products_are_within_what_the_rounding_of_operands_allows(left, right, rows, depth, spread, seed) -> None:
    a = values(rows, depth, spread, seed, torch.float32)
    b = values(128, depth, spread, seed + 1, torch.float32)
    found = scaled_product(
        quantize(a, left), quantize(b, right), (left.granularity, right.granularity), fast=True, emulate=True
    )
    exact, wide_a, wide_b = a.double() @ b.double().t(), a.double().abs(), b.double().abs()
    limit = bound(a, left) @ (wide_b + bound(b, right)).t() + wide_a @ bound(b, right).t()
    # Float32 sums of up to 256 terms.
    limit += 256 * 2**-24 * (wide_a + bound(a, left)) @ (wide_b + bound(b, right)).t()
    assert ((found.double() - exact).abs() <= limit).all()


@pytest.mark.parametrize("granularity", list(Granularity))
def test_zeros_stay_zeros(granularity: Granularity) -> None:
    quantized = quantize(torch.zeros(128, 128), Operand(granularity))
    assert not dequantize(quantized).any()
    assert quantized.scale.isfinite().all()


@pytest.mark.thorough
@pytest.mark.parametrize("magnitude", [1e-35, 1e-20, 1e20, 3e38])
@pytest.mark.parametrize("granularity", list(Granularity))
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_no_magnitude_overflows(magnitude: float, granularity: Granularity, dtype: torch.dtype) -> None:
    matrix = torch.full((128, 128), magnitude)
    back = dequantize(quantize(matrix, Operand(granularity, dtype)))
    if magnitude >= 1e-20:
        torch.testing.assert_close(back, matrix, rtol=1e-5, atol=0)
    assert back.isfinite().all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("granularity", list(Granularity))
@pytest.mark.parametrize("power_of_two", [False, True])
def test_what_is_not_finite_does_not_come_out_as_a_number(value: float, granularity: Granularity, power_of_two) -> None:
    matrix = torch.ones(128, 128)
    matrix[5, 7] = value
    operand = Operand(granularity, power_of_two=power_of_two)
    quantized, other = quantize(matrix, operand), quantize(torch.ones(128, 128), operand)
    kinds = (granularity, granularity)
    assert not scaled_product(quantized, other, kinds, fast=True, emulate=True)[5].isfinite().any()


def test_a_transposed_matrix_is_stored_by_rows_of_its_own() -> None:
    matrix = values(128, 256, 1.0, 0, torch.float32)
    quantized = quantize(matrix.t(), Operand(Granularity.ROW))
    again = quantize(matrix.t().contiguous(), Operand(Granularity.ROW))
    assert quantized.data.is_contiguous()
    assert torch.equal(dequantize(quantized), dequantize(again))


def test_the_largest_value_of_a_scale_becomes_the_largest_number_of_the_format() -> None:
    matrix = torch.tensor([[1.0, -3.5], [0.0, 7.0]])
    whole = quantize(matrix, Operand(Granularity.TENSOR))
    assert whole.data.float().tolist() == [[64.0, -224.0], [0.0, 448.0]]
    assert whole.scale.tolist() == [[pytest.approx(1 / 64)]]
    rows = quantize(matrix, Operand(Granularity.ROW))
    assert rows.data.float().tolist() == [[128.0, -448.0], [0.0, 448.0]]
    assert rows.scale.tolist() == [[pytest.approx(1 / 128)], [pytest.approx(1 / 64)]]
    exact = quantize(torch.tensor([[1.0, -3.0]]), Operand(Granularity.ROW, power_of_two=True))
    assert exact.data.float().tolist() == [[128.0, -384.0]]  # 448 / 3, rounded down to a power of two
    wide = quantize(torch.tensor([[7.0, 1.0]]), Operand(Granularity.ROW, E5M2))
    assert wide.data.float().tolist() == [[57344.0, 8192.0]]


def test_scales_of_blocks_are_of_128_values_of_a_row_or_of_128_rows() -> None:
    matrix = torch.ones(256, 384)
    matrix[130, 129], matrix[2, 383] = 7.0, 3.5
    tiles = quantize(matrix, Operand(Granularity.TILE))
    assert tiles.scale.shape == (256, 3)
    unusual = (tiles.scale - 1 / 448).abs() > 1e-5
    assert unusual.nonzero().tolist() == [[2, 2], [130, 1]]
    squares = quantize(matrix, Operand(Granularity.SQUARE))
    assert squares.scale.mul(448).round(decimals=3).tolist() == [[1.0, 1.0, 3.5], [1.0, 7.0, 1.0]]
    for quantized in (tiles, squares):
        torch.testing.assert_close(dequantize(quantized), matrix, rtol=2**-4, atol=0)
