"""Linear layers with products in float8; their weights keep their dtype.

Shapes: R rows, I features in, O features out, ``...`` any leading dims.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from d9d_core.deferral import Deferral
from d9d_nn.ops.deferred import Product, as_autocast, may_defer, product
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from d9d_fp8.recipes import output, rows_gradient, weight_gradient


class Float8:
    """Mixin that multiplies in float8; a class lists it before its base, a subclass of :class:`d9d_nn.linear.Linear`.

    Attributes:
        float8_recipe: name in :data:`d9d_fp8.recipes.RECIPES`.
        float8_emulate: whether to multiply in float32, with operands rounded to float8.
    """

    float8_recipe: str
    float8_emulate: bool
    weight: nn.Parameter
    bias: nn.Parameter | None

    def multiply(self, rows: Tensor, deferral: Deferral | None) -> Tensor:
        """Multiply rows [..., I] by the weight in float8; return [..., O]."""
        rows, weight = as_autocast(rows), as_autocast(self.weight)
        flat = rows.reshape(-1, rows.shape[-1])
        if may_defer(weight, deferral):
            assert deferral is not None
            out = product(flat, weight, deferral, _parts(self.float8_recipe, self.float8_emulate))
        else:
            out = _Product.apply(flat, weight, self.float8_recipe, self.float8_emulate)
        if self.bias is not None:
            out = out + self.bias.to(out.dtype)
        return out.view(*rows.shape[:-1], out.shape[-1])

    def lend_product(self, compute: Callable[[Tensor], Tensor | None]) -> bool:  # noqa: ARG002 - never called
        """Refuse to let a fused kernel compute the product instead of the layer, because it would not use float8."""
        return False

    def extra_repr(self) -> str:
        """Sizes and recipe of the layer."""
        above: str = super().extra_repr()  # type: ignore[misc]
        return f"{above}, float8={self.float8_recipe}{' emulated' if self.float8_emulate else ''}"


def convert(layer: Any, kinds: dict[type, type], recipe: str, *, emulate: bool) -> None:
    """Make a layer compute in float8, in place, by replacing its class with a subclass.

    Args:
        layer: layer of a subclass of :class:`d9d_nn.linear.Linear`.
        kinds: cache of the subclasses, by the layer's class. Layers of one class get the same subclass, so that the
            strategy ``compile`` compiles equal blocks once.
        recipe: name of the recipe.
        emulate: whether to multiply in float32.
    """
    own = type(layer)
    if own not in kinds:
        kinds[own] = type(f"Float8{own.__name__}", (Float8, own), {})
    layer.__class__ = kinds[own]
    layer.float8_recipe, layer.float8_emulate = recipe, emulate


def is_converted(layer: nn.Module) -> bool:
    """Whether :func:`convert` was applied to the layer."""
    return isinstance(layer, Float8)


def _parts(recipe: str, emulate: bool) -> Product:
    return Product(
        forward=lambda rows, weight: output(recipe, rows, weight, emulate=emulate),
        rows_gradient=lambda grad, weight: rows_gradient(recipe, grad, weight, emulate=emulate),
        weight_gradient=lambda rows, grad: weight_gradient(recipe, rows, grad, emulate=emulate),
    )


class _Product(torch.autograd.Function):
    """Product that saves its operands unquantised; the backward quantises them along their other dimension."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, recipe: str, emulate: bool) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.recipe, ctx.emulate = recipe, emulate
        return output(recipe, rows, weight, emulate=emulate)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        rows, weight = ctx.saved_tensors
        grad_rows = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_rows = rows_gradient(ctx.recipe, grad, weight, emulate=ctx.emulate)
        if ctx.needs_input_grad[1]:
            grad_weight = weight_gradient(ctx.recipe, rows, grad, emulate=ctx.emulate)
        return grad_rows, grad_weight, None, None
