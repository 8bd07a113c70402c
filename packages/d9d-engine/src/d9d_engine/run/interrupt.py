"""Ctrl-C and SIGTERM as a request to stop after the step."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Interrupts:
    """Signal handlers within a block: the first SIGINT or SIGTERM sets :attr:`requested`, the second SIGINT interrupts.

    Outside the main thread signals cannot be caught, and the block changes nothing.
    """

    def __init__(self) -> None:
        self.requested: str | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        self.requested = None
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._request)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _request(self, number: int, _frame: FrameType | None) -> None:
        if self.requested is not None and number == signal.SIGINT:
            raise KeyboardInterrupt("again, so at once; what came after the newest checkpoint is lost")
        self.requested = signal.Signals(number).name
