"""Low-rank updates of stacked expert weights (banks).

Shapes: R rows, E experts, I features in, O features out, r rank.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from d9d_core.deferral import Deferral
from d9d_core.kernel import OpSlot
from d9d_nn.ops.grouped_linear import grouped_linear
from torch import Tensor, nn

from d9d_peft.lora.dropout import dropped, layout_dependence


class GroupedTerm(nn.Module):
    """LoRA update of stacked expert weights: ``scale * dropout(x) A[e] B[e]`` for the rows x of each expert e.

    Args:
        bank: weights of all experts, [E, I, O], on any device.
        rank: r.
        scale: factor of the update.
        dropout: fraction of the inputs that is dropped in training.
    """

    def __init__(self, bank: Tensor, rank: int, scale: float, dropout: float) -> None:
        super().__init__()
        experts, features_in, features_out = bank.shape
        self.lora_scale, self.lora_dropout, self.lora_off = scale, dropout, False
        self.lora_A = nn.Parameter(bank.new_empty(experts, features_in, rank))
        self.lora_B = nn.Parameter(bank.new_empty(experts, rank, features_out))
        self.down = _product(features_in, rank, experts)
        self.up = _product(rank, features_out, experts)
        self._deferral: Deferral | None = None

    def reset_parameters(self) -> None:
        """Draw A from U(-1/sqrt(I), 1/sqrt(I)), and zero B."""
        bound = self.lora_A.shape[1] ** -0.5
        nn.init.uniform_(self.lora_A, -bound, bound)
        nn.init.zeros_(self.lora_B)

    def op_slots(self) -> Mapping[str, OpSlot]:
        """Op slots of the grouped products with A and with B."""
        return {"down": self.down, "up": self.up}

    def defer_to(self, deferral: Deferral | None) -> Collection[str]:
        """Let ``deferral`` compute the weight gradients of A and B later."""
        self._deferral = deferral
        return ("lora_A", "lora_B")

    def layout_dependence(self) -> Sequence[str]:
        """Describe how dropout, if there is any, depends on the division of the batch into microbatches."""
        return layout_dependence(self.lora_dropout)

    def forward(self, rows: Tensor, counts: Tensor, *, spare_rows: bool) -> Tensor:
        """Map rows [R, I], sorted by expert, to the update [R, O] of the layer's output.

        Takes the arguments of :func:`d9d_nn.ops.grouped_linear.grouped_linear`.
        """
        if self.lora_off:
            return rows.new_zeros(())  # 0-d: adding it takes no memory and keeps the dtype
        how = {"spare_rows": spare_rows, "deferral": self._deferral}
        inner = self.down(dropped(rows, self.lora_dropout, self.training), self.lora_A, counts, **how)
        out: Tensor = self.up(inner, self.lora_B, counts, **how)
        return out * self.lora_scale

    @torch.no_grad()
    def merge_into(self, bank: nn.Parameter) -> None:
        """Add the LoRA update to the experts' weights in ``bank``. Collective over the ranks that hold shards of it."""
        bank.copy_(merged_bank(bank, self.lora_A, self.lora_B, self.lora_scale))


def merged_bank(bank: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Expert weights with the update: ``W[e] + scale * A[e] B[e]``, [E, I, O].

    Computed in float32 or wider, and rounded to the dtype of W.
    """
    wide = torch.promote_types(bank.dtype, torch.float32)
    return (bank.to(wide) + scale * torch.bmm(a.to(wide), b.to(wide))).to(bank.dtype)


def _product(features_in: int, features_out: int, experts: int) -> OpSlot:
    return OpSlot("grouped_linear", grouped_linear, in_features=features_in, out_features=features_out, experts=experts)
