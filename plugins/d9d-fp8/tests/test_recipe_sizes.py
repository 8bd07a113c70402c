"""Sizes of layers that a recipe accepts."""

from __future__ import annotations

import pytest
from d9d_fp8.recipes import _ROW, _SQUARE, _TENSOR, _TILE, Recipe


@pytest.mark.parametrize("fine", [_TILE, _SQUARE])
def test_both_sizes_of_a_layer_are_multiples_of_the_largest_block_of_any_product(fine: object) -> None:
    for output, rows in (((_TENSOR, fine), (_ROW, _ROW)), ((_TENSOR, _TENSOR), (fine, _ROW))):
        assert Recipe(output, rows, None).divisor == 128  # type: ignore[arg-type]
    assert Recipe((_TENSOR, _ROW), (_ROW, _TENSOR), (_TILE, _TILE)).divisor == 16
