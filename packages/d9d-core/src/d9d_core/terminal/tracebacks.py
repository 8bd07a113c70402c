"""Tracebacks of uncaught exceptions, with control characters escaped."""

from __future__ import annotations

import sys
import threading
import traceback
from types import TracebackType
from typing import Any

from d9d_core.untrusted import visible


def make_tracebacks_visible() -> None:
    """From now on, escape control characters in uncaught exceptions of all threads and destructors.

    Hooks that other code has installed are kept.
    """
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _uncaught
    if threading.excepthook is threading.__excepthook__:
        threading.excepthook = _uncaught_in_thread
    if sys.unraisablehook is sys.__unraisablehook__:
        sys.unraisablehook = _unraisable


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    _write("", kind, error, trace)


def _uncaught_in_thread(found: threading.ExceptHookArgs) -> None:
    if found.exc_type is not SystemExit:
        name = found.thread.name if found.thread is not None else threading.get_ident()
        _write(f"Exception in thread {name}:\n", found.exc_type, found.exc_value, found.exc_traceback)


def _unraisable(found: Any) -> None:
    what = found.err_msg or "Exception ignored in"
    _write(f"{what}: {found.object!r}\n", found.exc_type, found.exc_value, found.exc_traceback)


def _write(headline: str, kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    text = headline + "".join(traceback.format_exception(kind, error, trace))
    if sys.stderr is not None:
        sys.stderr.write(visible(text))
        sys.stderr.flush()
