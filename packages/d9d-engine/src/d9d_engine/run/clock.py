"""Clock of the speed that is logged."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Clock of the seconds between two log entries, on the host, without evaluations, checkpoints and other pauses."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._stopped: float | None = None

    def take(self) -> float:
        """Seconds since the last call, or since the clock was made."""
        now = time.perf_counter()
        seconds, self._start = now - self._start, now
        return seconds

    def stop(self) -> None:
        """Leave out the time from now until :meth:`go`; nothing if it is stopped."""
        if self._stopped is None:
            self._stopped = time.perf_counter()

    def go(self) -> None:
        """Count again; nothing if it was not stopped."""
        if self._stopped is not None:
            self._start += time.perf_counter() - self._stopped
            self._stopped = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time of the block out."""
        before = time.perf_counter()
        try:
            yield
        finally:
            self._start += time.perf_counter() - before
