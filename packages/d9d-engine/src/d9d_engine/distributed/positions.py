"""Split of a sample's positions over the ranks of ``cp``, in zigzag order.

A sample's S positions are split into 2 R chunks for R ranks; rank r has chunks r and 2 R - 1 - r, so that under a
causal mask all ranks have equal work (same aim as Brandon et al. 2023, "Striped Attention", section 3; order from
Llama Team 2024, "The Llama 3 Herd of Models", section 3.3.2).

Shapes: B samples, S positions, R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["ZigzagPositions"]


@dataclass(frozen=True, slots=True)
class ZigzagPositions:
    """Positions of samples on one rank of ``cp``; a :class:`~d9d_core.model.PositionShare`.

    Attributes:
        ranks: number R of ranks.
        rank: number of this rank.
    """

    ranks: int
    rank: int

    @staticmethod
    def chunks(ranks: int, rank: int) -> tuple[int, int]:
        """Indices of a rank's two chunks of positions, out of 2 R (zigzag), ascending."""
        return rank, 2 * ranks - 1 - rank

    def own(self, tensor: Tensor) -> Tensor:
        """This rank's positions [B, S / R, ...] of [B, S, ...].

        Raises:
            ValueError: 2 R does not divide S.
        """
        self.check(tensor.shape[1])
        chunks = tensor.chunk(2 * self.ranks, dim=1)
        return torch.cat([chunks[number] for number in self.chunks(self.ranks, self.rank)], dim=1)

    def check(self, positions: int) -> None:
        """Check that a number of positions can be split evenly over the ranks.

        Raises:
            ValueError: 2 R does not divide the number.
        """
        if positions % (2 * self.ranks):
            raise ValueError(
                f"mesh.cp is {self.ranks}: each rank gets two chunks of every sample, but 2 x {self.ranks} does not "
                f"divide the {positions} positions of this batch; choose a sequence length that is a multiple of "
                f"{2 * self.ranks}, or another cp"
            )

    @staticmethod
    def joined(parts: Tensor) -> Tensor:
        """Join the parts of all ranks [R, B, S / R, ...] to full samples [B, S, ...], in the order of positions."""
        early, late = parts.movedim(0, 1).chunk(2, dim=2)  # [B, R, chunk, ...]
        return torch.cat([early, late.flip(1)], dim=1).flatten(1, 2)

    @staticmethod
    def parted(samples: Tensor, ranks: int) -> Tensor:
        """Split full samples [B, S, ...] into the parts of all ranks [R, B, S / R, ...], contiguous."""
        count, positions, *rest = samples.shape
        chunks = samples.reshape(count, 2, ranks, positions // (2 * ranks), *rest)
        early, late = chunks.movedim(2, 0).unbind(2)  # [R, B, chunk, ...]
        return torch.cat([early, late.flip(0)], dim=2)
