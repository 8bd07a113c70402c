"""Ctrl-C, SIGTERM and a closed terminal as a request to stop after the step. Imports no torch."""

from __future__ import annotations

import atexit
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any


def stop_signals() -> list[signal.Signals]:
    """Signals that ask to save and stop, besides Ctrl-C: SIGTERM, and SIGHUP unless it is ignored, as under nohup."""
    hangup: Any = getattr(signal, "SIGHUP", None)  # of a terminal that is closed; Windows has none
    heeded = hangup is not None and signal.getsignal(hangup) != signal.SIG_IGN
    return [signal.SIGTERM, *[hangup] * heeded]


class Terminated(KeyboardInterrupt):
    """A signal to stop, other than Ctrl-C, arrived while nothing could be saved yet; its name is the text."""


class Interrupts:
    """Requests to stop: in a block, the first signal to stop sets :attr:`requested`, the second SIGINT interrupts.

    Outside the main thread signals cannot be caught, and the block changes nothing.

    Attributes:
        requested: name of the signal that asks to stop; ``None`` if nobody has asked, and again after the block.
        entered: called when the block begins: from now on there is something to save.
    """

    def __init__(self) -> None:
        self.requested: str | None = None
        self.entered: Callable[[], None] = lambda: None
        self._raises = False
        self._previous: dict[int, Any] = {}
        self._process = os.getpid()

    def request(self, name: str) -> None:
        """Ask to stop, as the signal of that name does. Before the block, this stops what begins there."""
        self.requested = self.requested or name

    @contextmanager
    def noted(self) -> Iterator[Interrupts]:
        """A stop signal inside the block, before and after training, is a request, too; for a whole process."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        self._process = os.getpid()
        previous = {number: signal.signal(number, self._note) for number in stop_signals()}
        try:
            yield self
        finally:
            for number, handler in previous.items():
                # What was saved stays saved, although the interpreter takes its time to end.
                atexit.register(signal.signal, number, signal.SIG_IGN)
                signal.signal(number, handler)

    @contextmanager
    def raised(self) -> Iterator[None]:
        """A stop signal inside a block within :meth:`noted` ends it, as nothing needs to be saved.

        Raises:
            Terminated: one has arrived.
        """
        self._raises = True
        try:
            self._raise_requested()
            yield
        except Exception:
            self._raise_requested()  # what was interrupted may have taken it for a failure of its own
            raise
        finally:
            self._raises = False

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Like the block itself, but a request stays after it, for the next block: each is one step of several."""
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

    def _is_of_a_child(self, number: int) -> bool:
        """Whether this is a forked process, such as a worker of a plugin; the signal then has its usual effect."""
        if os.getpid() == self._process:
            return False
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        os.kill(os.getpid(), number)
        return True

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self._is_of_a_child(number):
            return
        self.request(signal.Signals(number).name)
        if self._raises:
            raise Terminated(self.requested)

    def _request(self, number: int, _frame: FrameType | None) -> None:
        if self._is_of_a_child(number):
            return
        if self.requested is not None and number == signal.SIGINT:
            raise KeyboardInterrupt("again, so at once; what came after the newest checkpoint is lost")
        self.requested = signal.Signals(number).name
