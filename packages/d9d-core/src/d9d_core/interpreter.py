"""Commands for Python child processes that import from the working directory only if this process does.

``python -m`` and ``python -c`` search the working directory first. The command ``d9d`` does not: it may run in a
downloaded model directory that contains a malicious ``typing.py``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["children_import_as_here"]

_SAFE = "PYTHONSAFEPATH"


def python_command() -> list[str]:
    """Python command, to be followed by ``-m`` or ``-c``, that finds the same modules as this process."""
    return [sys.executable] if _imports_from_working_directory() else [sys.executable, "-P"]


@contextmanager
def children_import_as_here() -> Iterator[None]:
    """Make child processes that are started inside the block search for modules in the same places as this process."""
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
