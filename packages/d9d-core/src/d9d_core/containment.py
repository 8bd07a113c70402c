"""References to attributes of modules, resolved only when they are needed, and what such code may do."""

from __future__ import annotations

import importlib
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from d9d_core.errors import interrupt_behind

#: What code of a plugin may raise. SystemExit is among it: a plugin must not end d9d as if all had gone well.
FOREIGN_FAILURES = (Exception, SystemExit)

_leave = os._exit
_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


@contextmanager
def exits_raised() -> Iterator[None]:
    """Make ``os._exit`` raise SystemExit inside the block: in the main thread, and with status 0 in any thread.

    d9d's own calls come from other threads, with other statuses. Child processes end with it as always.
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
    """Return to the working directory after the block: paths of a job, such as ``run.dir``, are relative to it."""
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


@dataclass(frozen=True, slots=True)
class Ref:
    """Reference ``"package.module:attribute"``: lets a declaration name heavy code without importing it.

    Raises:
        ValueError: the text does not have that form.
    """

    target: str

    def __post_init__(self) -> None:
        if not _TARGET.fullmatch(self.target):
            raise ValueError(f"{self.target!r} is not of the form 'package.module:attribute'")

    def load(self) -> Any:
        """Import the module and return the attribute.

        Raises:
            ImportError: the module cannot be imported.
            AttributeError: it has no such attribute.
            KeyboardInterrupt: of the user.
        """
        module, _, path = self.target.partition(":")
        try:
            with directory_kept():
                value: Any = importlib.import_module(module)
        except Exception as error:
            if interrupt_behind(error):
                raise KeyboardInterrupt from error
            raise
        for part in path.split("."):
            value = getattr(value, part)
        return value

    def __str__(self) -> str:
        return self.target
