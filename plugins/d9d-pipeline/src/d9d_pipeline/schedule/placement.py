"""Placement of stages on ranks, as data."""

from __future__ import annotations

#: Rank -> its stages, in the order in which a microbatch meets them.
Placement = tuple[tuple[int, ...], ...]


def loop(ranks: int, stages_per_rank: int) -> Placement:
    """Placement of stages in turn around all ranks: with 2 ranks and 2 stages on each, (0, 2) and (1, 3)."""
    return tuple(tuple(range(rank, ranks * stages_per_rank, ranks)) for rank in range(ranks))


def vee(ranks: int) -> Placement:
    """Placement of two stages on each rank, down and back up: with 2 ranks (0, 3) and (1, 2).

    The last stage is where the first is, so tied embeddings share a rank.
    """
    return tuple((rank, 2 * ranks - 1 - rank) for rank in range(ranks))
