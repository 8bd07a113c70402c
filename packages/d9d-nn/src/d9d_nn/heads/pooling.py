"""Pooling of positions to samples. Shapes: B samples, S positions, H features."""

from __future__ import annotations

import torch
from torch import Tensor

from d9d_nn.heads.config import Pooling


def pool(hidden: Tensor, lengths: Tensor | None, pooling: Pooling) -> Tensor:
    """Pool each right-padded sample to one vector; padding counts for nothing, whatever it holds.

    Args:
        hidden: [B, S, H].
        lengths: int64 [B], tokens of each sample; ``None`` if there is no padding. A sample without tokens gives its
            first position (``last``) or zeros (``mean``).
        pooling: ``last`` position, or ``mean`` of all, summed in float32 or wider.

    Returns:
        [B, H] in the dtype of ``hidden``.

    Raises:
        ValueError: there is not one length per sample.
    """
    samples, positions, features = hidden.shape
    if lengths is not None and lengths.shape != (samples,):  # other shapes would broadcast to other means
        raise ValueError(f"lengths must have the shape ({samples},), one per sample; it is {tuple(lengths.shape)}")
    if pooling == "last":
        if lengths is None:
            return hidden[:, -1]
        index = (lengths - 1).clamp(min=0).view(samples, 1, 1)
        return hidden.gather(1, index.expand(samples, 1, features)).squeeze(1)
    wide = torch.promote_types(hidden.dtype, torch.float32)
    if lengths is None:
        return hidden.mean(dim=1, dtype=wide).to(hidden.dtype)
    inside = torch.arange(positions, device=hidden.device) < lengths.unsqueeze(1)
    total = torch.where(inside.unsqueeze(-1), hidden, 0).sum(dim=1, dtype=wide)
    return (total / lengths.clamp(min=1).unsqueeze(1)).to(hidden.dtype)
