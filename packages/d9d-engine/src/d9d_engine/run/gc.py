"""Control of Python's garbage collection during training."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def built_objects_spared() -> Iterator[None]:
    """Exclude all existing objects from garbage collection inside the block.

    Model, optimizer and libraries are hundreds of thousands of permanent objects. A full collection visits all of them,
    which takes more than 100 ms, at different times on each rank, and all other ranks wait.

    If a caller has frozen objects before, the objects frozen here stay frozen too: Python has a single set of frozen
    objects.
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
    """Garbage collection at fixed steps, instead of at times that Python chooses on each rank.

    A step with collectives takes as long as its slowest rank. If ranks collect at different steps, each collection
    delays all ranks; if all ranks collect after the same step, they are delayed once.

    Args:
        every: number of steps between collections of young objects (generation 1); ``None`` leaves them to Python.
    """

    def __init__(self, every: int | None) -> None:
        self._every = every

    @contextmanager
    def paced(self) -> Iterator[None]:
        """Disable Python's automatic collection inside the block."""
        before = gc.isenabled()
        if self._every is not None:
            gc.disable()
        try:
            yield
        finally:
            if before:
                gc.enable()

    def after_step(self, step: int) -> None:
        """Collect young objects if due after ``step`` steps."""
        if self._every is not None and step % self._every == 0:
            gc.collect(1)

    def after_pause(self) -> None:
        """Collect all objects after a checkpoint or an evaluation, where ranks wait for each other in any case."""
        if self._every is not None:
            gc.collect()
