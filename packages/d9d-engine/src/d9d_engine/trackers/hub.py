"""Hub of all trackers of a run; a failing one is reported once and never ends the training."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Literal

from d9d_core.protocols.metric import Table
from d9d_core.protocols.tracker import RunInfo, TakesTables, Tracker, TrackerRun
from d9d_core.types import State


class TrackerHub:
    """Hub that forwards to every tracker.

    Args:
        trackers: by a name that is unique within the job.
        warn: prints a line.
    """

    def __init__(self, trackers: Mapping[str, Tracker], warn: Callable[[str], None]) -> None:
        self._trackers = dict(trackers)
        self._warn = warn
        self._runs: dict[str, TrackerRun] = {}
        self._states: dict[str, State] = {}

    def open(self, run: RunInfo, states: Mapping[str, Any]) -> None:
        """Open every tracker, continuing those whose state a checkpoint kept."""
        self._states = dict(states)
        for name, tracker in self._trackers.items():
            opened = self._guard(name, lambda t=tracker, n=name: _opened(t, run, states.get(n)))  # type: ignore[misc]
            if opened is not None:
                self._runs[name] = opened

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log values after ``step`` steps."""
        for name, run in list(self._runs.items()):
            self._guard(name, lambda r=run: r.write(step, values))  # type: ignore[misc]

    def write_tables(self, step: int, tables: Mapping[str, Table]) -> None:
        """Log tables after ``step`` steps, where a tracker takes any."""
        for name, run in list(self._runs.items()):
            if isinstance(run, TakesTables):
                self._guard(name, lambda r=run: r.write_tables(step, tables))  # type: ignore[misc]

    def flush(self) -> None:
        """Flush every tracker, so that what was written survives a crash."""
        for name, run in list(self._runs.items()):
            self._guard(name, run.flush)

    def state(self) -> dict[str, State]:
        """States of the trackers by name; of one that failed, the last that is known."""
        for name, run in list(self._runs.items()):
            state = self._guard(name, lambda r=run: json.loads(json.dumps(r.state(), allow_nan=False)))  # type: ignore[misc]
            if state is not None:
                self._states[name] = state
        return dict(self._states)

    def close(self, status: Literal["finished", "stopped", "failed"]) -> None:
        """End every run."""
        for name, run in list(self._runs.items()):
            self._guard(name, lambda r=run: r.close(status))  # type: ignore[misc]
        self._runs.clear()

    def _guard(self, name: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            self._runs.pop(name, None)
            self._warn(f"tracker '{name}' failed and is switched off: {error!r}")
            return None


def _opened(tracker: Tracker, run: RunInfo, state: State | None) -> TrackerRun:
    opened = tracker.open(run, state)
    lacking = [name for name in ("write", "flush", "state", "close") if not callable(getattr(opened, name, None))]
    if lacking:
        raise TypeError(f"open() returned a {type(opened).__name__}, which lacks {', '.join(lacking)}")
    return opened
