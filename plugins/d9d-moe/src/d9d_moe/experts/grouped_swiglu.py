"""Experts of a layer as grouped SwiGLU: one parameter per projection (a bank) stacks the matrices of all experts.

Shapes: R rows, H features, I features inside, E experts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from d9d_core.deferral import Deferral
from d9d_core.kernel import OpSlot
from d9d_nn.ops.grouped_linear import grouped_linear
from d9d_nn.ops.silu_mul import silu_mul
from torch import Tensor, nn


class GroupedSwiGLU(nn.Module):
    """Grouped SwiGLU: ``(silu(x @ gate_proj[e]) * (x @ up_proj[e])) @ down_proj[e]`` for the rows x of each expert e.

    Args:
        hidden_size: H.
        intermediate_size: I.
        experts: E.
        std: initial standard deviation of the gate and up projections.
        output_std: initial standard deviation of the down projection.
    """

    def __init__(
        self, hidden_size: int, intermediate_size: int, experts: int, *, std: float, output_std: float
    ) -> None:
        super().__init__()
        self.std = std
        self.output_std = output_std
        self.gate_proj = nn.Parameter(torch.empty(experts, hidden_size, intermediate_size))
        self.up_proj = nn.Parameter(torch.empty(experts, hidden_size, intermediate_size))
        self.down_proj = nn.Parameter(torch.empty(experts, intermediate_size, hidden_size))
        self.into = _linear(hidden_size, intermediate_size, experts)
        self.out_of = _linear(intermediate_size, hidden_size, experts)
        self.silu_mul = OpSlot("silu_mul", silu_mul, features=intermediate_size)
        self.terms = nn.ModuleDict()
        self._deferral: Deferral | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw gate and up projections from N(0, std ** 2), the down projections from N(0, output_std ** 2)."""
        nn.init.normal_(self.gate_proj, std=self.std)
        nn.init.normal_(self.up_proj, std=self.std)
        nn.init.normal_(self.down_proj, std=self.output_std)

    def op_slots(self) -> Mapping[str, OpSlot]:
        """Slots of the ops ``grouped_linear`` (matrix products) and ``silu_mul`` (gate)."""
        return {"into": self.into, "out_of": self.out_of, "silu_mul": self.silu_mul}

    def banks(self) -> Mapping[str, nn.Parameter]:
        """Stacked weights of all three projections, by name."""
        return {"gate_proj": self.gate_proj, "up_proj": self.up_proj, "down_proj": self.down_proj}

    def bank_terms(self) -> nn.ModuleDict:
        """Modules whose outputs (such as LoRA's low-rank products) are added to the products, by name of the bank."""
        return self.terms

    def defer_to(self, deferral: Deferral | None) -> Collection[str]:
        """Compute the gradients of all three stacked weights later, when the ``deferral`` asks for them, if supported.

        The backend of the op ``grouped_linear`` must support deferred weight gradients.
        """
        self._deferral = deferral
        return ("gate_proj", "up_proj", "down_proj")

    def forward(self, tokens: Tensor, counts: Tensor, *, spare_rows: bool = True) -> Tensor:
        """Apply each expert to its rows.

        Args:
            tokens: [R, H], sorted by expert.
            counts: int64 [E], rows of each expert.
            spare_rows: whether there may be rows beyond the sum of ``counts``, whose outputs are zeros.

        Returns:
            [R, H].
        """
        gate = self._product(self.into, "gate_proj", tokens, counts, spare_rows)
        up = self._product(self.into, "up_proj", tokens, counts, spare_rows)
        return self._product(self.out_of, "down_proj", self.silu_mul(gate, up), counts, spare_rows)

    def _product(self, slot: OpSlot, bank: str, rows: Tensor, counts: Tensor, spare_rows: bool) -> Tensor:
        out: Tensor = slot(rows, getattr(self, bank), counts, spare_rows=spare_rows, deferral=self._deferral)
        return out + self.terms[bank](rows, counts, spare_rows=spare_rows) if bank in self.terms else out


def _linear(in_features: int, out_features: int, experts: int) -> OpSlot:
    return OpSlot("grouped_linear", grouped_linear, in_features=in_features, out_features=out_features, experts=experts)
