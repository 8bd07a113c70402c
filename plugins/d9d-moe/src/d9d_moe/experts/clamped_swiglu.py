"""Experts of a layer as grouped SwiGLU with biases and clamped inner features, as in gpt-oss.

Shapes: R rows, H features, I features inside, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from d9d_core.kernel import OpSlot
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from d9d_moe.experts.expert_bias import add_expert_bias, experts_of_rows
from d9d_moe.experts.grouped_swiglu import GroupedSwiGLU


class ClampedSwiGLU(GroupedSwiGLU):
    """Grouped SwiGLU with biases: ``clamped_silu_mul(x @ gate + b, x @ up + c) @ down + d`` for an expert's rows x.

    Each expert has its own ``gate``, ``up``, ``down`` and biases b, c, d. OpenAI 2025, "gpt-oss-120b & gpt-oss-20b
    Model Card", section 2.3.

    Args:
        hidden_size: H.
        intermediate_size: I.
        experts: E.
        std: initial standard deviation of the gate and up projections. Biases start at zero.
        output_std: initial standard deviation of the down projection.
        alpha: factor inside the sigmoid of :func:`clamped_silu_mul`.
        limit: bound at which :func:`clamped_silu_mul` clamps its inputs.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        experts: int,
        *,
        std: float,
        output_std: float,
        alpha: float = 1.702,
        limit: float = 7.0,
    ) -> None:
        super().__init__(hidden_size, intermediate_size, experts, std=std, output_std=output_std)
        self.gate_bias = nn.Parameter(torch.zeros(experts, intermediate_size))
        self.up_bias = nn.Parameter(torch.zeros(experts, intermediate_size))
        self.down_bias = nn.Parameter(torch.zeros(experts, hidden_size))
        gate = partial(clamped_silu_mul, alpha=alpha, limit=limit)
        self.silu_mul = OpSlot("clamped_silu_mul", gate, features=intermediate_size, alpha=alpha, limit=limit)

    def biases(self) -> Mapping[str, nn.Parameter]:
        """Biases of the projections, [E, I] or [E, H], by name."""
        return {name: own for name, own in self.named_parameters(recurse=False) if name.endswith("_bias")}

    def reset_parameters(self) -> None:
        """Draw the projections like :class:`GroupedSwiGLU`; set the biases to zero."""
        super().reset_parameters()
        for bias in self.biases().values():
            nn.init.zeros_(bias)

    def forward(self, tokens: Tensor, counts: Tensor, *, spare_rows: bool = True) -> Tensor:
        """Apply each expert to its rows, see :meth:`GroupedSwiGLU.forward`."""
        experts = experts_of_rows(counts, len(tokens))
        gate = self._product(self.into, "gate_proj", tokens, counts, spare_rows)
        up = self._product(self.into, "up_proj", tokens, counts, spare_rows)
        gate, up = add_expert_bias(gate, self.gate_bias, experts), add_expert_bias(up, self.up_bias, experts)
        out = self._product(self.out_of, "down_proj", self.silu_mul(gate, up), counts, spare_rows)
        return add_expert_bias(out, self.down_bias, experts)


def clamped_silu_mul(gate: Tensor, up: Tensor, *, alpha: float, limit: float) -> Tensor:
    """Reference of the op ``clamped_silu_mul``: ``g * sigmoid(alpha * g) * (u + 1)``, g and u clamped.

    g is at most ``limit``; u is between ``-limit`` and ``limit``. Only the arguments are kept for the backward.

    Args:
        gate: [..., I].
        up: [..., I].
        alpha: factor inside the sigmoid.
        limit: bound at which the inputs are clamped.

    Returns:
        [..., I] in the dtype of the arguments.
    """
    out: Tensor = _ClampedSiluMul.apply(gate, up, alpha, limit)
    return out


class _ClampedSiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.alpha, ctx.limit = alpha, limit
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (up + 1) * (gate * torch.sigmoid(gate * alpha))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        gate, up = ctx.saved_tensors
        alpha, limit = ctx.alpha, ctx.limit
        kept_gate, kept_up = gate <= limit, up.abs() <= limit  # as in torch, the bounds pass gradients
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        share = torch.sigmoid(gate * alpha)
        slope = share * (1 + alpha * gate * (1 - share))
        return grad * (up + 1) * slope * kept_gate, grad * gate * share * kept_up, None, None
