"""Treats Ctrl-C, SIGTERM and a closed terminal as requests to stop after the current step. Imports no torch."""

from __future__ import annotations

import atexit
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from d9d_core.launcher import EXIT_STOPPED

__all__ = ["Interrupts"]

#: Exit status after a stop request: the same command continues the run.
STOPPED = EXIT_STOPPED


def stop_signals() -> list[signal.Signals]:
    """Signals other than SIGINT that request a save and a stop: SIGTERM, and SIGHUP unless nohup ignores it."""
    hangup: Any = getattr(signal, "SIGHUP", None)  # a closed terminal; Windows has none
    heeded = hangup is not None and signal.getsignal(hangup) != signal.SIG_IGN
    return [signal.SIGTERM, *[hangup] * heeded]


class Terminated(KeyboardInterrupt):
    """Stop signal other than Ctrl-C that arrived when nothing could be saved; the text is the signal's name."""


class Interrupts:
    """Stop requests of a process; a context manager around the work that has progress to save.

    Inside the block, the first stop signal sets :attr:`requested`; a SIGINT after a request raises KeyboardInterrupt.

    Signals can only be caught in the main thread. A run in another thread, such as a worker of Ray, is asked to stop by
    :meth:`request`, which any thread may call::

        interrupts = Interrupts()
        trainer = job.build(topology=topology, interrupts=interrupts)
        threading.Thread(target=trainer.train).start()
        interrupts.request("preemption")  # all ranks finish the same step, save and return

    Attributes:
        requested: name of the signal that asks to stop, or argument of :meth:`request`; ``None`` without a request, and
            after the block.
        entered: called when the block begins; from then on there is progress to save.
    """

    def __init__(self) -> None:
        self.requested: str | None = None
        self.entered: Callable[[], None] = lambda: None
        self._raises = False
        self._previous: dict[int, Any] = {}
        self._process = os.getpid()

    def request(self, name: str) -> None:
        """Request a stop, from any thread. A request before the block takes effect in the block.

        One rank is enough: all ranks finish the same step, save and stop.

        Args:
            name: name of a signal, or a word for the cause; notes and ``stopped.json`` have it.
        """
        self.requested = self.requested or name

    @contextmanager
    def noted(self) -> Iterator[Interrupts]:
        """Also record stop signals other than Ctrl-C outside of the training block; for a process's whole work."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        self._process = os.getpid()
        previous = {number: signal.signal(number, self._note) for number in stop_signals()}
        try:
            yield self
        finally:
            for number, handler in previous.items():
                # Ignore signals during the interpreter's shutdown: everything is saved.
                atexit.register(signal.signal, number, signal.SIG_IGN)
                signal.signal(number, handler)

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Raise at once if a stop signal arrives inside the block, which has nothing to save; use inside :meth:`noted`.

        Raises:
            Terminated: a stop signal has arrived.
        """
        self._raises = True
        try:
            self._raise_requested()
            yield
        except Exception:
            self._raise_requested()  # interrupted code may have raised its own error because of the signal
            raise
        finally:
            self._raises = False

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Like ``with self``, but a request stays set for the next block; for callers with one block per step."""
        self.__enter__()
        try:
            yield
        finally:
            requested = self.requested
            self.__exit__(None, None, None)
            self.requested = requested

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._process = os.getpid()
            for number in (signal.SIGINT, *stop_signals()):
                self._previous[number] = signal.signal(number, self._request)
        self.entered()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._previous:
            signal.signal(*self._previous.popitem())
        self.requested = None

    def _raise_requested(self) -> None:
        if self.requested is not None:
            raise Terminated(self.requested) from None

    def _is_in_child(self, number: int) -> bool:
        """Whether this process is a forked child, such as a data worker; if so, give the signal its default effect."""
        if os.getpid() == self._process:
            return False
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        os.kill(os.getpid(), number)
        return True

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self._is_in_child(number):
            return
        self.request(signal.Signals(number).name)
        if self._raises:
            raise Terminated(self.requested)

    def _request(self, number: int, _frame: FrameType | None) -> None:
        if self._is_in_child(number):
            return
        if self.requested is not None and number == signal.SIGINT:
            raise KeyboardInterrupt("Ctrl-C while stopping: ended at once; steps after the newest checkpoint are lost")
        self.requested = signal.Signals(number).name
