"""Minimal layer that defers its weight gradient. Shapes: [B, F]."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from d9d_core.deferral import Deferral
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge


class Deferring(nn.Module):
    """Layer ``x @ weight`` with the trait :class:`d9d_core.traits.DefersWeights`.

    Args:
        features: F, of input and output. The weight [F, F] is initialised by torch's default generator.
    """

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(features, features))
        self.deferral: Deferral | None = None

    def defer_to(self, deferral: Deferral | None) -> Collection[str]:
        """Let a deferral compute the gradient of the weight later."""
        self.deferral = deferral
        return ("weight",)

    def forward(self, x: Tensor) -> Tensor:
        """[B, F] -> [B, F]."""
        if self.deferral is None or not self.deferral.wanted or not self.weight.requires_grad:
            return x @ self.weight
        # If only the weight needs a gradient, autograd would not call the op's backward without this input.
        alone = None if x.requires_grad else x.new_empty(0).requires_grad_()
        out: Tensor = _Product.apply(x, self.weight.detach(), self.deferral, get_gradient_edge(self.weight), alone)
        return out


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, deferral: Deferral, edge: GradientEdge, _alone: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.deferral, ctx.edge = deferral, edge
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        x, weight = ctx.saved_tensors
        x = x.detach()  # a tensor with a graph would keep the graph alive
        ctx.deferral.add(ctx.edge, lambda: x.T @ grad)
        return grad @ weight.T, None, None, None, None
