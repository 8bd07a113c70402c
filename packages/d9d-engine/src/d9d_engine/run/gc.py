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
