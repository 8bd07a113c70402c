"""Head of an embedding model. Shapes: B samples, S positions, H features, D features of an embedding."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from d9d_nn.heads.config import Pooling
from d9d_nn.heads.pooling import PoolsContext, pool


class EmbeddingHead(PoolsContext, nn.Module):
    """Embedding head: pools each sample, keeps its first features and normalises them. No parameters.

    Args:
        pooling: positions that represent a sample.
        normalize: whether to scale vectors to the norm 1.
        dim: D; ``None`` keeps all H features.
    """

    def __init__(self, *, pooling: Pooling, normalize: bool, dim: int | None) -> None:
        super().__init__()
        self.pooling, self.normalize, self.dim = pooling, normalize, dim

    def forward(self, hidden: Tensor, lengths: Tensor | None = None, ends: Tensor | None = None) -> dict[str, Tensor]:
        """Map hidden states [B, S, H] and lengths of samples int64 [B] to ``{"embedding": float32 [B, D]}``.

        With ``ends`` int64 [B, N] of the rows of packed samples, returns [B, N, D]; see
        :func:`~d9d_nn.heads.pooling.pool`.
        """
        pooled = pool(self.of_all_positions(hidden), lengths, self.pooling, ends)[..., : self.dim]
        wide = pooled.to(torch.promote_types(pooled.dtype, torch.float32))
        # A plain slice is a view, and FSDP2 warns about modules that return views.
        return {"embedding": functional.normalize(wide, dim=-1) if self.normalize else wide.clone()}
