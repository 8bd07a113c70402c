"""Learned sinks of attention. Shapes: N query heads."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class AttentionSinks(nn.Module):
    """Sinks of attention: one trained logit for each query head, weight [N], which takes a share of the softmax.

    A module, so that tensor parallelism splits its weight like the heads.

    Args:
        heads: N.
        std: standard deviation of the initial weight.
    """

    def __init__(self, heads: int, *, std: float) -> None:
        super().__init__()
        self.std = std
        self.weight = nn.Parameter(torch.empty(heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight from N(0, std)."""
        nn.init.normal_(self.weight, std=self.std)

    def forward(self) -> Tensor:
        """Sinks [N] of all heads, or of this rank's heads under ``tp``."""
        return self.weight
