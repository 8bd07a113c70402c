"""Garbage collection of Python during training."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def built_objects_spared() -> Iterator[None]:
    """Freeze all objects that exist already, for the collector, while the block runs.

    Model, optimizer and libraries are hundreds of thousands of objects that stay. A full collection visits all of them,
    for more than 100 ms, at a moment of its own on each rank, and all other ranks wait for that one.

    What a caller has frozen before stays frozen afterwards, and what the block froze with it: Python has one set of
    frozen objects.
    """
    before = gc.get_freeze_count()
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not before:
            gc.unfreeze()


class PacedCollection:
    """Garbage collection at steps of the run, in place of moments that Python chooses on each rank.

    A step with collectives takes as long as its slowest rank, so ranks that collect at different steps delay each other
    each time, and ranks that collect after the same step once.

    Args:
        every: steps between two collections of young objects (generation 1); ``None`` leaves all to Python.
    """

    def __init__(self, every: int | None) -> None:
        self._every = every

    @contextmanager
    def paced(self) -> Iterator[None]:
        """Keep Python from collecting by itself inside the block."""
        before = gc.isenabled()
        if self._every is not None:
            gc.disable()
        try:
            yield
        finally:
            if before:
                gc.enable()

    def after_step(self, step: int) -> None:
        """Collect young objects if it is time, after ``step`` steps."""
        if self._every is not None and step % self._every == 0:
            gc.collect(1)

    def after_pause(self) -> None:
        """Collect all objects, after a checkpoint or an evaluation: ranks have waited for each other anyway."""
        if self._every is not None:
            gc.collect()
