"""Auxiliary losses: loss terms that arise inside the model, far from the task's loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def add_auxiliary_loss(carrier: Tensor, total: Tensor, factor: Tensor) -> Tensor:
    """Have the backward that passes ``carrier`` treat ``total * factor`` as part of the loss.

    So a module can add a term of its own without handing it through the model's outputs: see
    :class:`d9d_core.traits.AddsLosses`. Nothing is added where no gradient comes back to the result.

    Args:
        carrier: output of the module; any shape and dtype.
        total: 0-d with a graph, the sum of the term over the microbatch.
        factor: 0-d, the gradient of ``total``. It must stay the same until the backward.

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
