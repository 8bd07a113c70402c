"""Positions of samples over the ranks of ``cp``, in zigzag order.

A sample's S positions are cut into 2 R chunks for R ranks; rank r has chunks r and 2 R - 1 - r. So under a causal mask
all ranks have the same work (Brandon et al. 2023, "Striped Attention", section 3, has the same aim; the order is that
of Llama Team 2024, "The Llama 3 Herd of Models", section 3.3.2).

Shapes: B samples, S positions, R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["ZigzagPositions"]


@dataclass(frozen=True, slots=True)
class ZigzagPositions:
    """Positions of samples that one rank of ``cp`` has, a :class:`~d9d_core.model.PositionShare`.

    Attributes:
        ranks: R.
        rank: number of this rank.
    """

    ranks: int
    rank: int

    @staticmethod
    def chunks(ranks: int, rank: int) -> tuple[int, int]:
        """Numbers of the chunks that a rank has, in order."""
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
        """Refuse a number of positions that ranks cannot share evenly.

        Raises:
            ValueError: 2 R does not divide it.
        """
        if positions % (2 * self.ranks):
            raise ValueError(
                f"mesh.cp is {self.ranks}: each rank has two chunks of every sample, but 2 x {self.ranks} does not "
                f"divide the {positions} positions of this batch; choose a sequence length that is a multiple of "
                f"{2 * self.ranks}, or another cp"
            )

    @staticmethod
    def joined(parts: Tensor) -> Tensor:
        """Parts of all ranks [R, B, S / R, ...] as whole samples [B, S, ...], in the order of positions."""
        early, late = parts.movedim(0, 1).chunk(2, dim=2)  # [B, R, chunk, ...]
        return torch.cat([early, late.flip(1)], dim=1).flatten(1, 2)

    @staticmethod
    def parted(samples: Tensor, ranks: int) -> Tensor:
        """Whole samples [B, S, ...] as the parts of all ranks [R, B, S / R, ...], contiguous."""
        count, positions, *rest = samples.shape
        chunks = samples.reshape(count, 2, ranks, positions // (2 * ranks), *rest)
        early, late = chunks.movedim(2, 0).unbind(2)  # [R, B, chunk, ...]
        return torch.cat([early, late.flip(0)], dim=2)
