"""Trackers: destinations of logged values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from d9d_core.protocols.metric import Table
from d9d_core.types import State


@dataclass(frozen=True, slots=True)
class RunInfo:
    """Facts about the run for trackers.

    Attributes:
        name: the run's name.
        directory: the run's directory.
        description: free text from the job file.
        config: the resolved job.
        total_steps: optimizer steps of the whole run.
        resumed_step: steps already done and saved, 0 for a new run. Entries of later steps must disappear.
    """

    name: str
    directory: Path
    description: str
    config: State
    total_steps: int
    resumed_step: int


class TrackerRun(Protocol):
    """Open run of a tracker. A failing tracker is reported once and never ends the training.

    Each tracker has a thread, in which all calls to it are made, in order. Training waits for them only before a
    checkpoint, at most ten seconds each for ``flush`` and ``state``, and at most thirty at the end of the run.
    """

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write values after ``step`` steps (1-based), by series name."""
        ...

    def flush(self) -> None:
        """Make everything written so far survive a crash; called before each checkpoint."""
        ...

    def state(self) -> State:
        """State from which :meth:`Tracker.open` continues this run, such as a run id."""
        ...

    def close(self, status: Literal["finished", "stopped", "failed"]) -> None:
        """End the run."""
        ...


@runtime_checkable
class TakesTables(Protocol):
    """Tracker run that takes tables too. One that does not never sees any."""

    def write_tables(self, step: int, tables: Mapping[str, Table]) -> None:
        """Write tables after ``step`` steps (1-based), by name; they are in the host's memory."""
        ...


class Tracker(Protocol):
    """Destination of logged values."""

    def open(self, run: RunInfo, state: State | None) -> TrackerRun:
        """Start a run, or continue the one whose ``state`` a checkpoint kept."""
        ...
