"""Division of the samples of a step (a pack) over ranks and microbatches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from d9d_core.data import DataContext
from d9d_core.errors import DataError


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of packs: division of a pack's samples over ranks and microbatches.

    Attributes:
        batch_size: number of samples of a pack, over all ranks.
        microbatch_size: number of samples of a microbatch on one rank.
        rank, ranks: index and number of the data-parallel ranks, which read different samples.
    """

    batch_size: int
    microbatch_size: int
    rank: int
    ranks: int

    @classmethod
    def of(cls, context: DataContext) -> Self:
        """Make the layout of a job.

        Raises:
            DataError: the batch cannot be divided into microbatches of equal size; the message names possible sizes.
        """
        unit = context.ranks * context.microbatch_size
        if context.batch_size % unit:
            below = context.batch_size // unit * unit
            options = " or ".join(str(size) for size in (below, below + unit) if size)
            raise DataError(
                f"a batch of {context.batch_size} samples cannot be divided over {context.ranks} data-parallel ranks "
                f"in microbatches of {context.microbatch_size}: it must be a multiple of {unit}; use {options}, or "
                "another microbatch size"
            )
        return cls(context.batch_size, context.microbatch_size, context.rank, context.ranks)

    @property
    def share(self) -> int:
        """Number of samples of a pack on one rank."""
        return self.batch_size // self.ranks
