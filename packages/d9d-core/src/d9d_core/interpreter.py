"""Python processes that d9d starts: they import from the working directory only where this process does.

``python -m`` and ``python -c`` look for modules in the working directory first. The command ``d9d`` does not: it may be
run in a model directory of somebody else, with a ``typing.py`` beside the weights.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["children_import_as_here"]

_SAFE = "PYTHONSAFEPATH"


def python_command() -> list[str]:
    """Command of a Python that finds the modules that this process finds, to be followed by ``-m`` or ``-c``."""
    return [sys.executable] if _imports_from_working_directory() else [sys.executable, "-P"]


@contextmanager
def children_import_as_here() -> Iterator[None]:
    """Have processes that a library starts within the block, as ``multiprocessing`` does, find the same modules."""
    if _SAFE in os.environ or _imports_from_working_directory():
        yield
        return
    os.environ[_SAFE] = "1"
    try:
        yield
    finally:
        os.environ.pop(_SAFE, None)


def _imports_from_working_directory() -> bool:
    here = os.path.realpath(os.curdir)
    return any(os.path.realpath(path or os.curdir) == here for path in sys.path)
