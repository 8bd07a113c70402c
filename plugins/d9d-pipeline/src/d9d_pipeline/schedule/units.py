"""Checks of arguments and orders of stage-microbatches that the schedules share."""

from __future__ import annotations

from collections.abc import Sequence

#: A stage and a microbatch.
Unit = tuple[int, int]


def check(name: str, ranks: int, microbatches: int, least: int = 1) -> None:
    """Refuse arguments that a schedule cannot take.

    Raises:
        ValueError: there are too few microbatches; the text says how many it takes.
    """
    if ranks < 1:
        raise ValueError(f"{name}: {ranks} pipeline ranks; at least 1")
    if microbatches < least:
        text = f"{name}: {microbatches} microbatch(es) are too few for {ranks} pipeline rank(s); at least {least}"
        raise ValueError(f"{text}: raise batch.size, lower batch.microbatch, or choose another schedule")


def rounds(microbatches: int, ranks: int) -> list[range]:
    """Groups of about as many microbatches as there are ranks, and no fewer unless that is all there are.

    A group passes through one stage of a rank after the other, so with fewer than ``ranks`` in it the ranks would wait
    for a microbatch to come around.
    """
    count = max(1, microbatches // ranks)
    edges = [microbatches * index // count for index in range(count + 1)]
    return [range(edges[index], edges[index + 1]) for index in range(count)]


def depth_first(stages: Sequence[int], groups: Sequence[range]) -> list[Unit]:
    """Order that takes each group of microbatches through all ``stages`` before the next group."""
    return [(stage, microbatch) for group in groups for stage in stages for microbatch in group]
