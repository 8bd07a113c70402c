"""Angles of rotary position embeddings.

Shapes: B samples, S positions, D features of a head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Rotation:
    """The rotation of each pair of features at each position, computed once and shared by all layers of a stage.

    A plain object, not a tuple: mixed-precision wrappers cast the tensors in tuples, and rounded angles would place
    distant tokens wrongly.

    Attributes:
        cos: float32 [B or 1, S, D/2].
        sin: float32 [B or 1, S, D/2].
    """

    cos: Tensor
    sin: Tensor


class RotaryEmbedding(nn.Module):
    """Positions -> rotations, with angle ``position * theta ** (-2 i / D)`` for pair i (Su et al. 2021, section 3.2.2).

    Holds no buffer: the frequencies are a handful of numbers, and what is not stored needs no initialisation.

    Args:
        head_dim: D.
        theta: the longest wavelength is ``2 pi theta``.
    """

    def __init__(self, head_dim: int, *, theta: float) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.theta = theta

    def forward(self, positions: Tensor) -> Rotation:
        """Compute the angles in float32.

        Args:
            positions: int64 [B or 1, S].
        """
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float32, device=positions.device) / self.head_dim
        angles = positions.unsqueeze(-1).float() / self.theta**exponents
        return Rotation(cos=angles.cos(), sin=angles.sin())
