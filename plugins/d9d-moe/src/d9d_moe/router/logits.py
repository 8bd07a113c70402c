"""Logits of a router in float32, from tokens and weights in bfloat16.

A product of two bfloat16 numbers is exact in float32, and tensor cores add up in float32: so these logits are those of
float32 copies of both, but for the order of sums, at the speed of bfloat16 products.

Shapes: T tokens, H features, E experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def bfloat16_logits(tokens: Tensor, weight: Tensor) -> Tensor:
    """Logits ``tokens @ weight.T`` in float32.

    The gradient of the logits, float32 too, enters the products of the backward as the sum of two bfloat16 tensors,
    which leaves it 16 bits: more than twice those of the gradients that come out.

    Args:
        tokens: bfloat16 [T, H].
        weight: bfloat16 [E, H].

    Returns:
        float32 [T, E].
    """
    logits: Tensor = _Logits.apply(tokens, weight)
    return logits


class _Logits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(tokens, weight)
        return _product(tokens, weight.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        tokens, weight = ctx.saved_tensors
        high = grad.to(tokens.dtype)
        low = (grad - high).to(tokens.dtype)
        both = torch.cat([high, low], dim=1)
        grad_tokens = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_tokens = both @ torch.cat([weight, weight])
        if ctx.needs_input_grad[1]:
            grad_weight = _product(both.t(), tokens).unflatten(0, (2, -1)).sum(0).to(weight.dtype)
        return grad_tokens, grad_weight


def _product(a: Tensor, b: Tensor) -> Tensor:
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()  # elsewhere, torch has no such product
