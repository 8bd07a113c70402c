"""End of a command's process: what a plugin or a library has left running must not keep it for ever."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from types import FrameType
from typing import Any

#: Seconds that threads and processes which a command leaves behind may go on after it.
PATIENCE = 30.0


def end_in_time(status: int) -> None:
    """End this process :data:`PATIENCE` seconds after its main thread if threads or child processes would keep it.

    The interpreter waits for every thread that is no daemon. A process without such ends as always.

    Args:
        status: exit status.
    """
    if not any(_left()):
        return

    def watch() -> None:
        threading.main_thread().join()
        time.sleep(PATIENCE)  # ends with the process, if that ends
        left = ", ".join(_left()) or "the end of the interpreter"
        text = f"warning: all was done {PATIENCE:g} s ago, but {left} still runs; this process ends without it\n"
        with suppress(OSError):
            os.write(2, text.encode(errors="replace"))
        for child in _children():
            child.kill()  # no process would wait for it
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
    """Processes of ``multiprocessing`` that the interpreter waits for; others it ends or leaves."""
    multiprocessing = sys.modules.get("multiprocessing")
    children = multiprocessing.active_children() if multiprocessing is not None else []
    return [child for child in children if not child.daemon]


def _place(frame: FrameType) -> str:
    """File and line of the code that is not Python's own, else of the innermost."""
    found: FrameType | None = frame
    while found is not None and os.path.dirname(found.f_code.co_filename) == os.path.dirname(threading.__file__):  # noqa: PTH120
        found = found.f_back
    found = found or frame
    return f"{found.f_code.co_filename}:{found.f_lineno}"
