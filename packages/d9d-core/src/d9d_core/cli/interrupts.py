"""Defers Ctrl-C while large modules such as torch are imported."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from d9d_core.cli.garbage import collected_seldom


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Defer a Ctrl-C that arrives inside the block to the end of the block.

    torch and numpy catch all exceptions of their optional imports, also KeyboardInterrupt: the interrupt would be lost,
    or leave a half-imported module. If other code has installed a signal handler, or in threads other than the main
    thread, nothing is deferred. Garbage is collected rarely inside the block.

    Raises:
        KeyboardInterrupt: an interrupt arrived inside the block.
    """
    with collected_seldom(), _deferred():
        yield


@contextmanager
def _deferred() -> Iterator[None]:
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield
        return
    interrupted = False

    def record(_number: int, _frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True

    signal.signal(signal.SIGINT, record)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if interrupted:
            raise KeyboardInterrupt
