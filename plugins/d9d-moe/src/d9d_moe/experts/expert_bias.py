"""Bias of each row's expert, added to rows that are sorted by expert.

Shapes: R rows, F features, E experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def experts_of_rows(counts: Tensor, rows: int) -> Tensor:
    """Expert of each row, int64 [R], from the rows of each expert, int64 [E]; E for spare rows.

    The host does not wait for the device, as ``torch.repeat_interleave`` would to learn the length of the result.
    """
    return torch.searchsorted(counts.cumsum(0), torch.arange(rows, device=counts.device), right=True)


def add_expert_bias(rows: Tensor, bias: Tensor, experts: Tensor) -> Tensor:
    """Add to each row the bias of its expert.

    The gradient of the biases is a matrix product, because autograd's gradient of an index would add all rows of an
    expert atomically, in any order and in the narrow dtype.

    Args:
        rows: [R, F].
        bias: [E, F], rounded to the dtype of the rows.
        experts: int64 [R] from :func:`experts_of_rows`; spare rows stay unchanged.

    Returns:
        [R, F] in the dtype of the rows.
    """
    out: Tensor = _AddExpertBias.apply(rows, bias, experts)
    return out


class _AddExpertBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, bias: Tensor, experts: Tensor) -> Tensor:
        ctx.save_for_backward(experts)
        ctx.count, ctx.dtype = len(bias), bias.dtype
        narrow = bias.to(rows.dtype)
        return rows + torch.cat([narrow, narrow.new_zeros(1, bias.shape[1])]).index_select(0, experts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (experts,) = ctx.saved_tensors
        if not ctx.needs_input_grad[1]:
            return grad, None, None
        belongs = torch.arange(ctx.count, device=grad.device).unsqueeze(1) == experts
        return grad, (belongs.to(grad.dtype) @ grad).to(ctx.dtype), None
