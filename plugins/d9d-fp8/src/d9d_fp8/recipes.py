"""Recipes: formats of the operands of a linear layer's three products.

Shapes: R rows, I features in, O features out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from d9d_fp8.products import as_dtype, divisor, scaled_product
from d9d_fp8.quantization import Granularity, Operand, quantize

Pair = tuple[Operand, Operand]


@dataclass(frozen=True, slots=True)
class Recipe:
    """Recipe of a linear layer's products.

    Attributes:
        output: formats of rows and weight in ``rows @ weight.T``.
        rows_gradient: formats of gradient and weight in ``gradient @ weight``.
        weight_gradient: formats of gradient and rows in ``gradient.T @ rows``; ``None`` for the job's own dtype.
    """

    output: Pair
    rows_gradient: Pair
    weight_gradient: Pair | None

    @property
    def divisor(self) -> int:
        """Number of which both sizes of a layer must be multiples."""
        return max(divisor(operand.granularity) for operand in (*self.output, *self.rows_gradient))


_TENSOR, _ROW = Operand(Granularity.TENSOR), Operand(Granularity.ROW, power_of_two=True)
_TILE, _SQUARE = Operand(Granularity.TILE), Operand(Granularity.SQUARE)
_WIDE = Operand(Granularity.TENSOR, torch.float8_e5m2)

#: Recipes by name. All but the last use the formats of torchao's recipe of the same name.
RECIPES = {
    "rowwise": Recipe((_ROW, _ROW), (_ROW, _ROW), (_ROW, _ROW)),
    "rowwise_gw_hp": Recipe((_ROW, _ROW), (_ROW, _TENSOR._replace(power_of_two=True)), None),
    "tensorwise": Recipe((_TENSOR, _TENSOR), (_WIDE, _TENSOR), (_WIDE, _TENSOR)),
    "blockwise": Recipe((_TILE, _SQUARE), (_TILE, _SQUARE), (_TILE, _TILE)),
}


def output(recipe: str, rows: Tensor, weight: Tensor, *, emulate: bool) -> Tensor:
    """Output [R, O] of a layer: rows [R, I] times the transposed weight [O, I], in the dtype of the rows."""
    return _product(rows, weight, RECIPES[recipe].output, fast=True, emulate=emulate)


def rows_gradient(recipe: str, grad: Tensor, weight: Tensor, *, emulate: bool) -> Tensor:
    """Gradient [R, I] of the rows, from the gradient of the output [R, O] and the weight [O, I]."""
    return _product(grad, weight.t(), RECIPES[recipe].rows_gradient, emulate=emulate)


def weight_gradient(recipe: str, rows: Tensor, grad: Tensor, *, emulate: bool) -> Tensor:
    """Gradient [O, I] of the weight, from rows [R, I] and the gradient of the output [R, O]."""
    pair = RECIPES[recipe].weight_gradient
    if pair is None:
        return grad.t() @ rows
    if missing := -len(rows) % divisor(pair[0].granularity):
        rows, grad = (functional.pad(part, (0, 0, 0, missing)) for part in (rows, grad))
    return _product(grad.t(), rows.t(), pair, emulate=emulate)


def _product(a: Tensor, b: Tensor, pair: Pair, *, emulate: bool, fast: bool = False) -> Tensor:
    """Float8 product ``a @ b.T``, returned in the dtype of ``a``."""
    if not a.numel():  # no maximum to compute a scale from; the product is empty or all zeros
        return a.new_zeros(len(a), len(b))
    kinds = (pair[0].granularity, pair[1].granularity)
    product = scaled_product(quantize(a, pair[0]), quantize(b, pair[1]), kinds, fast=fast, emulate=emulate)
    return as_dtype(product, a.dtype)
