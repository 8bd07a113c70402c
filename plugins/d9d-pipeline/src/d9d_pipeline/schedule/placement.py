"""Placement of stages on ranks."""

from __future__ import annotations

#: Rank -> its stages, in the order in which a microbatch passes through them.
Placement = tuple[tuple[int, ...], ...]


def loop(ranks: int, stages_per_rank: int) -> Placement:
    """Placement of stages round-robin on the ranks: with 2 ranks and 2 stages on each, (0, 2) and (1, 3)."""
    return tuple(tuple(range(rank, ranks * stages_per_rank, ranks)) for rank in range(ranks))


def vee(ranks: int) -> Placement:
    """Placement of two stages on each rank, from first to last rank and back: with 2 ranks (0, 3) and (1, 2).

    The first and the last stage are on one rank, so the copies of a tied embedding are on one rank too.
    """
    return tuple((rank, 2 * ranks - 1 - rank) for rank in range(ranks))
