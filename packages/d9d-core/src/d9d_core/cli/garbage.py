"""Garbage collection of Python while a command starts."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

#: New objects between two collections. The imports of torch make a million that stay: with Python's own number, the
#: collector looks at them so often that it takes a fifth of the time.
_SELDOM = 100_000


@contextmanager
def collected_seldom() -> Iterator[None]:
    """Collect garbage seldom inside the block, which imports or builds what stays."""
    young, *older = gc.get_threshold()
    if young:  # else somebody has switched it off
        gc.set_threshold(max(young, _SELDOM), *older)
    try:
        yield
    finally:
        gc.set_threshold(young, *older)
