"""Keeping Python's garbage collector out of the way of training."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def built_objects_spared() -> Iterator[None]:
    """Have the collector pass over everything that exists already while the block runs.

    Model, optimizer and libraries are hundreds of thousands of objects that stay. A full collection visits all of them,
    for more than 100 ms, at a moment of its own on each rank, and all other ranks wait for that one.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
