"""Clock of the speed that is logged."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Clock of the seconds between two log entries, on the host, without evaluations, checkpoints and other pauses."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def take(self) -> float:
        """Seconds since the last call, or since the clock was made."""
        now = time.perf_counter()
        seconds, self._start = now - self._start, now
        return seconds

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time of the block out."""
        before = time.perf_counter()
        try:
            yield
        finally:
            self._start += time.perf_counter() - before
