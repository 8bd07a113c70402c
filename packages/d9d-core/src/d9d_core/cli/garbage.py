"""Makes Python's garbage collection rarer while a command imports its modules."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

#: Smallest number of new objects between two collections. The imports of torch create a million objects that stay
#: alive; with Python's default threshold, collections take a fifth of the import time.
_SELDOM = 100_000


@contextmanager
def collected_seldom() -> Iterator[None]:
    """Run Python's garbage collector rarely inside the block. Meant for imports, whose objects stay alive anyway."""
    young, *older = gc.get_threshold()
    if young:  # 0: automatic collection is disabled
        gc.set_threshold(max(young, _SELDOM), *older)
    try:
        yield
    finally:
        gc.set_threshold(young, *older)
