"""Grouped linear layer: one matrix for each group of rows.

Shapes: R rows, G groups, I features in, O features out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from d9d_core.deferral import Deferral
from d9d_core.kernel import OpSlot
from torch import Tensor, nn

from d9d_nn.ops.grouped_linear import grouped_linear


class GroupedLinear(nn.Module):
    """Grouped linear layer ``x @ weight[g]`` for the rows x of each group g; weight [G, I, O], no bias.

    Groups are experts, or any division of rows, such as languages or modalities. The layer has the traits ``HasOps``,
    ``HasBanks`` (LoRA) and ``DefersWeights``. If the groups are experts of a model, it is sharded over ``ep`` by group.

    Args:
        groups: G.
        in_features: I.
        out_features: O.
        std: standard deviation of the initial weight.
    """

    def __init__(self, groups: int, in_features: int, out_features: int, *, std: float) -> None:
        super().__init__()
        self.std = std
        self.weight = nn.Parameter(torch.empty(groups, in_features, out_features))
        self.product = OpSlot(
            "grouped_linear", grouped_linear, in_features=in_features, out_features=out_features, experts=groups
        )
        self.terms = nn.ModuleDict()
        self._deferral: Deferral | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight from N(0, std)."""
        nn.init.normal_(self.weight, std=self.std)

    def op_slots(self) -> Mapping[str, OpSlot]:
        """Slot of the op ``grouped_linear``."""
        return {"product": self.product}

    def banks(self) -> Mapping[str, nn.Parameter]:
        """Parameters with the group as dimension 0: the stacked matrices of all groups."""
        return {"weight": self.weight}

    def bank_terms(self) -> nn.ModuleDict:
        """Modules of a fine-tuning method such as LoRA, whose outputs are added to the product."""
        return self.terms

    def defer_to(self, deferral: Deferral | None) -> Collection[str]:
        """Let ``deferral`` compute the weight gradient later; returns the names of the parameters concerned."""
        self._deferral = deferral
        return ("weight",)

    def forward(self, rows: Tensor, counts: Tensor, *, spare_rows: bool = True) -> Tensor:
        """Multiply each group's rows by the group's matrix.

        Args:
            rows: [R, I], sorted by group.
            counts: int64 [G], rows of each group, on the device of the rows.
            spare_rows: whether there may be rows beyond the sum of ``counts``, whose outputs are zeros.

        Returns:
            [R, O].
        """
        out: Tensor = self.product(rows, self.weight, counts, spare_rows=spare_rows, deferral=self._deferral)
        return out + self.terms["weight"](rows, counts, spare_rows=spare_rows) if "weight" in self.terms else out
