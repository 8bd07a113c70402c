"""Products of rows with weights whose weight gradients can be deferred.

Shapes: ``...`` any leading dims, I features in, O features out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from d9d_core.deferral import Deferral
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Product:
    """Product and its two gradients. None of these functions is recorded by autograd.

    Attributes:
        forward: function of rows and weight that returns the output.
        rows_gradient: function of the output's gradient and the weight that returns the gradient of the rows.
        weight_gradient: function of rows and the output's gradient that returns the gradient of the weight.
    """

    forward: Callable[[Tensor, Tensor], Tensor]
    rows_gradient: Callable[[Tensor, Tensor], Tensor]
    weight_gradient: Callable[[Tensor, Tensor], Tensor]


def may_defer(weight: Tensor, deferral: Deferral | None) -> bool:
    """Whether :func:`product` has a weight gradient to defer; a compiled graph never defers."""
    if deferral is None or not deferral.wanted or torch.compiler.is_compiling():
        return False
    return weight.requires_grad and torch.is_grad_enabled()


def product(rows: Tensor, weight: Tensor, deferral: Deferral, parts: Product, bias: Tensor | None = None) -> Tensor:
    """Compute ``parts.forward(rows, weight)``; the deferral decides when the weight gradient is computed.

    Args:
        rows: rows to multiply.
        weight: weight that needs a gradient. It may be the result of operations such as a cast, through which autograd
            passes the gradient when the deferral computes it.
        deferral: deferral of the module's stage.
        parts: functions of the product and its gradients.
        bias: bias that ``parts.forward`` adds to each row; given here only to compute its gradient.
    """
    # Autograd does not see that the weight needs a gradient, so an empty input that needs one makes the backward run.
    alone = None if rows.requires_grad else rows.new_empty(0).requires_grad_()
    edge = get_gradient_edge(weight)
    out: Tensor = _Product.apply(rows, weight.detach(), bias, deferral, parts, edge, alone)
    return out


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, deferral: Deferral | None) -> Tensor:
    """Compute :func:`torch.nn.functional.linear`, bit for bit; its weight gradient may be deferred.

    Args:
        x: [..., I].
        weight: [O, I].
        bias: [O]; its gradient is never deferred, since summing the rows is cheaper than keeping them in memory.
        deferral: deferral of the module's stage, if it has one.

    Returns:
        [..., O].
    """
    if not may_defer(weight, deferral):
        return functional.linear(x, weight, bias)
    assert deferral is not None
    x, weight, bias = as_autocast(x), as_autocast(weight), None if bias is None else as_autocast(bias)
    return product(x, weight, deferral, _LINEAR if bias is None else _linear_plus(bias.detach()), bias)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        _bias: Tensor | None,
        deferral: Deferral,
        parts: Product,
        edge: GradientEdge,
        _alone: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.deferral, ctx.parts, ctx.edge = deferral, parts, edge
        return parts.forward(rows, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor | None, None, None, None, None]:
        rows, weight = ctx.saved_tensors
        parts = ctx.parts
        rows_gradient = parts.rows_gradient(grad, weight) if ctx.needs_input_grad[0] else None
        bias_gradient = _flat(grad).sum(0) if ctx.needs_input_grad[2] else None
        rows = rows.detach()
        ctx.deferral.add(ctx.edge, lambda: parts.weight_gradient(rows, grad))
        return rows_gradient, None, bias_gradient, None, None, None, None


def _linear_plus(bias: Tensor | None) -> Product:
    return Product(
        forward=lambda x, weight: functional.linear(x, weight, bias),
        rows_gradient=lambda grad, weight: _flat(grad).mm(weight).view(*grad.shape[:-1], weight.shape[1]),
        # The same product as in torch's backward of x @ weight.T, so that results are equal bit for bit.
        weight_gradient=lambda x, grad: _flat(grad).t().mm(_flat(x)),
    )


_LINEAR = _linear_plus(None)


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def as_autocast(x: Tensor) -> Tensor:
    """Cast an argument of a linear layer as autocast does if it is on; autograd records the cast."""
    dtype = autocast_dtype(x)
    return x if dtype is None else x.to(dtype)


def as_autocast_together(weights: Sequence[Tensor]) -> list[Tensor]:
    """Cast several weights [..., I] like :func:`as_autocast`, into adjacent memory."""
    dtypes = [autocast_dtype(weight) for weight in weights]
    if all(dtype in (None, weight.dtype) for dtype, weight in zip(dtypes, weights, strict=True)):
        return list(weights)
    if not torch.is_grad_enabled():  # torch.compile of torch 2.11 would lose arguments of apply() here
        return list(_cast_together(weights))
    found: tuple[Tensor, ...] = _CastTogether.apply(*weights)
    return list(found)


def _cast_together(weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    together = torch.cat([as_autocast(weight) for weight in weights])
    return torch.split(together, [len(weight) for weight in weights])


class _CastTogether(torch.autograd.Function):
    """Cast of several weights; the results are adjacent in memory, but each has a gradient of its own.

    The backward of ``cat`` and ``split`` would copy the gradients into one tensor.
    """

    @staticmethod
    def forward(ctx: Any, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.dtypes = [weight.dtype for weight in weights]
        return _cast_together(weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return tuple(grad.to(dtype) for grad, dtype in zip(grads, ctx.dtypes, strict=True))


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Dtype that autocast casts an argument of a product to; ``None`` if it does not cast, or is off."""
    device = x.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device) if x.is_floating_point() and x.dtype != torch.float64 else None
