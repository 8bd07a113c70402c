"""Simulation of a world of which only one process exists: meshes of any size, without communication."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from torch import distributed as dist

# The one way to get at the fake backend: importing this module registers it. A test fails when that changes.
from torch.testing._internal.distributed.fake_pg import FakeStore

__all__ = ["simulated_world"]


@contextmanager
def simulated_world(size: int, rank: int = 0) -> Iterator[None]:
    """Simulate a world inside the block: this process is rank ``rank`` of ``size``, and collectives do nothing.

    Within a real world of that size the block changes nothing.

    Raises:
        RuntimeError: there is a real world of another size.
    """
    if dist.is_initialized():
        if dist.get_world_size() != size:
            raise RuntimeError(f"this process is one of {dist.get_world_size()}; it cannot simulate a world of {size}")
        yield
        return
    hook = sys.excepthook
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    sys.excepthook = hook  # torch's puts the rank in front of every line of a traceback; here is one process
    try:
        yield
    finally:
        dist.destroy_process_group()
