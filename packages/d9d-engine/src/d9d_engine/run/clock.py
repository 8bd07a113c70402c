"""Clock that measures the time between log entries, for the logged speed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Clock of the host's seconds between two log entries, without evaluations, checkpoints and other pauses."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._stopped: float | None = None

    def take(self) -> float:
        """Seconds since the last call or the creation of the clock, without the excluded time."""
        now = time.perf_counter()
        seconds, self._start = now - self._start, now
        return seconds

    def stop(self) -> None:
        """Exclude the time until :meth:`go`; no effect if the clock is stopped."""
        if self._stopped is None:
            self._stopped = time.perf_counter()

    def go(self) -> None:
        """Continue after :meth:`stop`; no effect if the clock runs."""
        if self._stopped is not None:
            self._start += time.perf_counter() - self._stopped
            self._stopped = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time of the block."""
        before = time.perf_counter()
        try:
            yield
        finally:
            self._start += time.perf_counter() - before
