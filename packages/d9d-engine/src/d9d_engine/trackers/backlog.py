"""Backlog of a tracker: entries that it may not have written yet."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from d9d_core.tracker import Histogram, SeriesName, split_tags

#: Kinds of values that a checkpoint can save as JSON; pending entries of other kinds are lost in a crash.
_KINDS = ("write", "write_texts", "write_histograms")


class Backlog:
    """Backlog of a tracker: entries since its last flush, which a checkpoint saves if the tracker is behind.

    Filled by the training thread, emptied by the tracker's thread.

    Args:
        step: number of the step up to which the tracker has flushed all entries.
        room: largest number of entries; older entries are dropped.
    """

    def __init__(self, step: int, room: int) -> None:
        self._lock = threading.Lock()
        self._step = self._last = step
        self._count = 0
        self._entries: deque[tuple[int, str, int, Mapping[str, Any]]] = deque(maxlen=room)

    def add(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Add an entry: values that are also passed to the tracker."""
        with self._lock:
            self._last = max(self._last, step)
            if kind in _KINDS:
                self._count += 1
                self._entries.append((self._count, kind, step, values))

    def mark(self) -> Callable[[], None]:
        """Return a function to call once the tracker has flushed all entries so far."""
        with self._lock:
            count, step = self._count, self._last

        def flushed() -> None:
            with self._lock:
                while self._entries and self._entries[0][0] <= count:
                    self._entries.popleft()
                self._step = step

        return flushed

    def state(self) -> dict[str, Any]:
        """Step of the last flush, and the entries since then, in a form for JSON."""
        with self._lock:
            entries = [(kind, step, values) for _, kind, step, values in self._entries]
            step = self._step
        return {"step": step, "entries": [[kind, at, _plain(kind, values)] for kind, at, values in entries]}

    @staticmethod
    def read(entries: Sequence[Any]) -> Iterator[tuple[str, int, dict[str, Any]]]:
        """Yield kind, step and values of each entry of a state that :meth:`state` returned."""
        for kind, step, values in entries:
            named = {SeriesName(name, tags) if tags else name: value for name, tags, value in values}
            yield kind, step, {name: _value(kind, value) for name, value in named.items()}


def _plain(kind: str, values: Mapping[str, Any]) -> list[Any]:
    """Values with their names and tags, as JSON values; non-finite numbers, which JSON lacks, become strings."""

    def number(value: float) -> float | str:
        return value if math.isfinite(value) else str(value)

    def plain(value: Any) -> Any:
        if kind == "write_histograms":
            return [list(map(number, value.counts.tolist())), number(float(value.low)), number(float(value.high))]
        return value if kind == "write_texts" else number(value)

    named = [(*split_tags(name), value) for name, value in values.items()]
    return [[str(name), dict(tags), plain(value)] for name, tags, value in named]


def _value(kind: str, value: Any) -> Any:
    if kind == "write_histograms":
        counts, low, high = value
        return Histogram(torch.tensor(list(map(float, counts)), dtype=torch.float64), float(low), float(high))
    return value if kind == "write_texts" else float(value)
