"""Auxiliary losses: loss terms computed inside the model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def add_auxiliary_loss(carrier: Tensor, total: Tensor, factor: Tensor) -> Tensor:
    """Make the backward through ``carrier`` treat ``total * factor`` as part of the loss.

    A module can therefore add a term of its own without returning it from the model: see
    :class:`d9d_core.traits.AddsLosses`. Nothing is added if the result gets no gradient.

    Args:
        carrier: output of the module; any shape and dtype.
        total: sum of the loss term over the microbatch, 0-d, attached to the autograd graph.
        factor: 0-d, the gradient of ``total``; must not change before the backward.

    Returns:
        ``carrier``, unchanged; its gradient passes unchanged too.
    """
    carried: Tensor = _AddAuxiliaryLoss.apply(carrier, total, factor)
    return carried


class _AddAuxiliaryLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, carrier: Tensor, total: Tensor, factor: Tensor) -> Tensor:
        ctx.dtype = total.dtype
        ctx.save_for_backward(factor)
        return carrier.view_as(carrier)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (factor,) = ctx.saved_tensors
        return grad, factor.to(ctx.dtype), None
