"""Containment of plugin code: catches its exceptions and restores process state that it changes."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["FOREIGN_FAILURES"]

#: Exceptions of plugin code that d9d catches. SystemExit is included, so that a plugin cannot make a command succeed.
FOREIGN_FAILURES = (Exception, SystemExit)

_leave = os._exit


@contextmanager
def exits_raised() -> Iterator[None]:
    """Make ``os._exit`` raise SystemExit inside the block, if called in the main thread or with status 0.

    Calls from other threads with another status, as d9d makes them, and calls in child processes exit as usual.
    """
    own, before = os.getpid(), os._exit

    def leave(status: int) -> None:
        main = threading.current_thread() is threading.main_thread()
        if os._exit is not _leave and os.getpid() == own and (main or not status):
            raise SystemExit(f"os._exit({status})")
        _leave(status)

    os._exit = leave  # type: ignore[assignment]
    try:
        yield
    finally:
        os._exit = before


@contextmanager
def directory_kept() -> Iterator[None]:
    """Restore the working directory after the block, because paths of a job, such as ``run.dir``, depend on it."""
    try:
        before = Path.cwd()
    except OSError:  # it was deleted
        before = None
    try:
        yield
    finally:
        if before is not None:
            with suppress(OSError):
                os.chdir(before)
