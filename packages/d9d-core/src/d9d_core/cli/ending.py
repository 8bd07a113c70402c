"""Ends the process of a command within a bounded time, even if threads or child processes still run."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from types import FrameType
from typing import Any

#: Seconds that threads and child processes may go on running after the command's main thread has ended.
PATIENCE = 30.0


def end_in_time(status: int) -> None:
    """End this process at most :data:`PATIENCE` seconds after its main thread, if other threads or children still run.

    The interpreter itself waits for every thread and child process that is not a daemon. Without such threads and
    processes this function does nothing.

    Args:
        status: exit status.
    """
    if not any(_left()):
        return

    def watch() -> None:
        threading.main_thread().join()
        time.sleep(PATIENCE)  # this thread is a daemon: if the process ends sooner, the thread ends with it
        left = ", ".join(_left()) or "the end of the interpreter"
        text = f"warning: all was done {PATIENCE:g} s ago, but {left} still runs; this process ends without it\n"
        with suppress(OSError):
            os.write(2, text.encode(errors="replace"))
        for child in _children():
            child.kill()  # os._exit does not wait for children
        os._exit(status)

    threading.Thread(target=watch, name="d9d-end", daemon=True).start()


def _left() -> Iterator[str]:
    """Describe the threads and the child processes that the interpreter waits for."""
    frames = sys._current_frames()  # noqa: SLF001 - documented, and the only way
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            frame = frames.get(thread.ident or 0)
            yield f"the thread '{thread.name}'" + (f" ({_place(frame)})" if frame is not None else "")
    yield from (f"the process '{child.name}' ({child.pid})" for child in _children())


def _children() -> list[Any]:
    """Child processes of ``multiprocessing`` that the interpreter waits for: all but daemons."""
    multiprocessing = sys.modules.get("multiprocessing")
    children = multiprocessing.active_children() if multiprocessing is not None else []
    return [child for child in children if not child.daemon]


def _place(frame: FrameType) -> str:
    """File and line that a thread executes. Frames in top-level modules of Python's library are skipped if possible."""
    found: FrameType | None = frame
    while found is not None and os.path.dirname(found.f_code.co_filename) == os.path.dirname(threading.__file__):  # noqa: PTH120
        found = found.f_back
    found = found or frame
    return f"{found.f_code.co_filename}:{found.f_lineno}"
