"""Functions shared by the schedules: checks of arguments, and orders of stages and microbatches."""

from __future__ import annotations

from collections.abc import Sequence

#: Index of a stage, and index of a microbatch.
Unit = tuple[int, int]


def check(name: str, ranks: int, microbatches: int, least: int = 1) -> None:
    """Raise an error if a schedule does not support the numbers of ranks and microbatches.

    Raises:
        ValueError: there are no ranks or too few microbatches; the message says how many are needed.
    """
    if ranks < 1:
        raise ValueError(f"{name}: the number of pipeline ranks is {ranks}; it must be at least 1")
    if microbatches < least:
        text = f"{name}: {microbatches} microbatch(es) are too few for {ranks} pipeline rank(s); at least {least}"
        raise ValueError(f"{text}: raise batch.size, lower batch.microbatch, or choose another schedule")


def rounds(microbatches: int, ranks: int) -> list[range]:
    """Divide microbatches into groups of at least ``ranks`` microbatches, or one smaller group if there are fewer.

    A group passes through the stages of a rank one after another. In a group of fewer than ``ranks``, ranks would wait
    for a microbatch to return.
    """
    count = max(1, microbatches // ranks)
    return [range(microbatches * index // count, microbatches * (index + 1) // count) for index in range(count)]


def depth_first(stages: Sequence[int], groups: Sequence[range]) -> list[Unit]:
    """Order that takes each group of microbatches through all ``stages`` before the next group."""
    return [(stage, microbatch) for group in groups for stage in stages for microbatch in group]
