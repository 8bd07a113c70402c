"""Head ``two_ends``: the first and the last state of a text, one after the other, as its vector.

Shapes: B samples, S positions, H features.
"""

from __future__ import annotations

import torch
from d9d_nn.heads.pooling import PoolsContext, pool
from torch import Tensor, nn


class TwoEnds(PoolsContext, nn.Module):
    """Head without parameters."""

    def forward(
        self,
        hidden: Tensor,
        lengths: Tensor | None = None,
        ends: Tensor | None = None,
        mask: Tensor | None = None,  # noqa: ARG002 - for heads that average marked positions
    ) -> dict[str, Tensor]:
        """Map hidden states [B, S, H] to ``{"embedding": float32 [B, 2 H]}``."""
        whole = self.of_all_positions(hidden)
        first, last = pool(whole, lengths, "first", ends), pool(whole, lengths, "last", ends)
        return {"embedding": torch.cat([first, last], dim=-1).float()}
