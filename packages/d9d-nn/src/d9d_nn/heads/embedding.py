"""Head of an embedding model. Shapes: B samples, S positions, H features, D features of an embedding."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from d9d_nn.heads.config import Pooling
from d9d_nn.heads.pooling import PoolsContext, pool


class EmbeddingHead(PoolsContext, nn.Module):
    """Embedding head: pools each sample, maps it linearly, keeps its first features and normalises them.

    Without ``projection`` there is no linear map, and the head has no parameters.

    Args:
        pooling: positions that represent a sample.
        normalize: whether to scale vectors to the norm 1.
        dim: D; ``None`` keeps all features.
        hidden_size: H; needed with ``projection``.
        projection: number of outputs of the linear map, weight [projection, H]; ``None`` for no map.
        std: standard deviation of the initial weight.
    """

    def __init__(
        self,
        *,
        pooling: Pooling,
        normalize: bool,
        dim: int | None,
        hidden_size: int | None = None,
        projection: int | None = None,
        std: float = 0.02,
    ) -> None:
        super().__init__()
        self.pooling, self.normalize, self.dim, self.std = pooling, normalize, dim, std
        self.weight: nn.Parameter | None = None
        if projection is not None:
            assert hidden_size is not None
            self.features = hidden_size
            self.weight = nn.Parameter(torch.empty(projection, hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight from N(0, std), if there is one."""
        if self.weight is not None:
            nn.init.normal_(self.weight, std=self.std)

    def forward(
        self,
        hidden: Tensor,
        lengths: Tensor | None = None,
        ends: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Map hidden states [B, S, H] and lengths of samples int64 [B] to ``{"embedding": float32 [B, D]}``.

        With ``ends`` int64 [B, N] of the rows of packed samples, returns [B, N, D]; see
        :func:`~d9d_nn.heads.pooling.pool`, also for ``mask``.
        """
        pooled = pool(self.of_all_positions(hidden), lengths, self.pooling, ends, mask)
        if self.weight is not None:
            pooled = functional.linear(pooled, self.weight)
        pooled = pooled[..., : self.dim]
        wide = pooled.to(torch.promote_types(pooled.dtype, torch.float32))
        # A copy, because a slice is a view, and FSDP2 warns about modules that return views.
        return {"embedding": functional.normalize(wide, dim=-1) if self.normalize else wide.clone()}
