"""Op ``rope``: rotate queries and keys by their position (Su et al. 2021, "RoFormer", equation 34).

Shapes: B samples, S positions, N query heads, K key heads, D features of a head. Feature i is paired with feature
i + D/2, as in Hugging Face checkpoints. The slot's static fact is ``head_dim``.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rope(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Reference: rotate each pair of features, in the wider of the dtypes of features and angles, then round.

    Args:
        query: [B, S, N, D].
        key: [B, S, K, D].
        cos: float32 [B or 1, S, D/2], cosine of the angle of each pair.
        sin: float32 [B or 1, S, D/2].

    Returns:
        Rotated query and key, shapes and dtypes unchanged.
    """
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    return _rotate(query, cos, sin), _rotate(key, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)
