"""Simulation of a world with one real process: meshes of any size, without communication."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from torch import distributed as dist

# Importing this private module registers the fake backend; there is no public way. A test detects changes.
from torch.testing._internal.distributed.fake_pg import FakeStore

__all__ = ["simulated_world"]


@contextmanager
def simulated_world(size: int, rank: int = 0) -> Iterator[None]:
    """Simulate a world inside the block: this process is rank ``rank`` of ``size``; collectives do nothing.

    Inside a real world of the same size, the block has no effect.

    Raises:
        RuntimeError: the process is in a real world of another size.
    """
    if dist.is_initialized():
        if dist.get_world_size() != size:
            raise RuntimeError(f"this process is one of {dist.get_world_size()}; it cannot simulate a world of {size}")
        yield
        return
    hook = sys.excepthook
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    sys.excepthook = hook  # torch's hook adds the rank to every line of a traceback
    try:
        yield
    finally:
        dist.destroy_process_group()
