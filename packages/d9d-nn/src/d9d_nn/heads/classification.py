"""Head of a classifier. Shapes: B samples, S positions, H features, C classes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from d9d_nn.heads.config import Pooling
from d9d_nn.heads.pooling import PoolsContext, pool


class ClassificationHead(PoolsContext, nn.Module):
    """Classification head: pools each sample, applies dropout and projects to classes; weight [C, H], no bias.

    Args:
        hidden_size: H.
        num_classes: C.
        pooling: positions that represent a sample.
        std: standard deviation of the initial weights.
        dropout: fraction of the pooled features that is dropped in training.
    """

    def __init__(
        self, hidden_size: int, num_classes: int, *, pooling: Pooling, std: float, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.dropout = dropout
        self.pooling, self.std, self.features = pooling, std, hidden_size
        self.weight = nn.Parameter(torch.empty(num_classes, hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight from N(0, std)."""
        nn.init.normal_(self.weight, std=self.std)

    def layout_dependence(self) -> Sequence[str]:
        """Describe how dropout depends on the layout; empty if no features are dropped."""
        return ["dropout of a head draws random numbers per microbatch"] if self.dropout else []

    def forward(
        self,
        hidden: Tensor,
        lengths: Tensor | None = None,
        ends: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Map hidden states [B, S, H] and lengths of samples int64 [B] to ``{"class_logits": float32 [B, C]}``.

        With ``ends`` int64 [B, N] of the rows of packed samples, returns [B, N, C]; see
        :func:`~d9d_nn.heads.pooling.pool`, also for ``mask``.
        """
        pooled = pool(self.of_all_positions(hidden), lengths, self.pooling, ends, mask)
        if self.dropout:
            pooled = functional.dropout(pooled, self.dropout, self.training)
        logits = functional.linear(pooled, self.weight)
        return {"class_logits": logits.to(torch.promote_types(logits.dtype, torch.float32))}
