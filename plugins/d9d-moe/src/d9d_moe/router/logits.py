"""Logits of a router in float32, from tokens and weights in bfloat16.

A product of two bfloat16 numbers is exact in float32, and tensor cores accumulate in float32. These logits therefore
equal the logits of float32 copies up to the order of sums, at the speed of bfloat16 products.

Shapes: T tokens, H features, E experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def bfloat16_logits(tokens: Tensor, weight: Tensor) -> Tensor:
    """Logits ``tokens @ weight.T`` in float32.

    In the backward, the float32 gradient of the logits enters the products as the sum of two bfloat16 tensors, which
    keeps at least 16 significant bits: twice as many as the resulting gradients have.

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
            grad_weight = _product(both.t(), tokens).view(2, *weight.shape).sum(0).to(weight.dtype)
        return grad_tokens, grad_weight


def _product(a: Tensor, b: Tensor) -> Tensor:
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()  # torch has out_dtype only on CUDA
