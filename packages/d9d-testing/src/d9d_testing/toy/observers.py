"""Toy subscriber that records events, and toy tracker that may fail."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from d9d_core.events import CATALOGUE
from d9d_core.tracker import RunInfo
from d9d_core.types import State

from d9d_testing.toy.config import ToyRecorderConfig, ToyTrackerConfig


class ToyRecorder:
    """Subscriber that appends the name of every event to a file."""

    def __init__(self, config: ToyRecorderConfig) -> None:
        self._path = config.path

    def subscriptions(self) -> Iterable[tuple[type[Any], Callable[[Any], None]]]:
        return [(event, self._record) for event in CATALOGUE]

    def _record(self, event: object) -> None:
        with self._path.open("a") as file:
            file.write(type(event).__name__ + "\n")


class ToyTracker:
    """Tracker that appends its calls to a file, and may raise in one of them."""

    def __init__(self, config: ToyTrackerConfig) -> None:
        self._config = config

    def _call(self, name: str, text: str) -> None:
        if self._config.path is not None:
            with self._config.path.open("a") as file:
                file.write(f"{name} {text}\n")
        if name == self._config.fails_in:
            raise OSError("connection lost")

    def open(self, run: RunInfo, state: State | None) -> ToyTracker:
        """Start a run, or continue the run with the saved id."""
        self._call("open", f"{run.name} at {run.resumed_step} with {state}")
        return self

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Record the step and the number of values."""
        self._call("write", f"{step}: {len(values)} values")

    def flush(self) -> None:
        """Record the call."""
        self._call("flush", "")

    def state(self) -> State:
        """State for checkpoints: the run id."""
        return {"id": "toy-1"}

    def close(self, status: Literal["finished", "stopped", "failed"]) -> None:
        """Record the end of the run."""
        self._call("close", status)
