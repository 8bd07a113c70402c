"""A subscriber that records, and a tracker that fails."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from d9d_core.loop.events import CATALOGUE
from d9d_core.protocols import RunInfo, State

from d9d_testing.toy.config import ToyRecorderConfig, ToyTrackerConfig


class ToyRecorder:
    """Appends the name of every event to a file."""

    def __init__(self, config: ToyRecorderConfig) -> None:
        self._path = config.path

    def subscriptions(self) -> Iterable[tuple[type[Any], Callable[[Any], None]]]:
        """Everything."""
        return [(event, self._record) for event in CATALOGUE]

    def _record(self, event: object) -> None:
        with self._path.open("a") as file:
            file.write(type(event).__name__ + "\n")


class ToyTracker:
    """Raises in one of its calls."""

    def __init__(self, config: ToyTrackerConfig) -> None:
        self._fails_in = config.fails_in

    def _call(self, name: str) -> None:
        if name == self._fails_in:
            raise OSError("connection lost")

    def open(self, run: RunInfo, state: State | None) -> ToyTracker:  # noqa: ARG002
        """Start."""
        self._call("open")
        return self

    def write(self, step: int, values: Mapping[str, float]) -> None:  # noqa: ARG002
        """Nowhere."""
        self._call("write")

    def flush(self) -> None:
        """Nothing."""
        self._call("flush")

    def state(self) -> State:
        """Nothing."""
        return {}

    def close(self, status: Literal["finished", "stopped", "failed"]) -> None:  # noqa: ARG002
        """End."""
        self._call("close")
