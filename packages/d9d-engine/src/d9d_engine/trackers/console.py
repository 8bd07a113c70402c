"""Console tracker: one line of text per logged step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from d9d_core.protocols.tracker import RunInfo
from d9d_core.types import State

from d9d_engine.trackers.config import ConsoleConfig


class ConsoleTracker:
    """Tracker that prints to standard output."""

    def __init__(self, config: ConsoleConfig) -> None:
        self._config = config

    def open(self, run: RunInfo, state: State | None) -> ConsoleRun:  # noqa: ARG002 - there is nothing to continue
        """Start printing."""
        if run.description:
            print(f"{run.name}: {run.description}", flush=True)  # noqa: T201 - its purpose
        return ConsoleRun(run.total_steps)


class ConsoleRun:
    """An open console."""

    def __init__(self, total_steps: int) -> None:
        self._total = total_steps

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Print one line."""
        shown = "  ".join(f"{name} {_format(name, value)}" for name, value in values.items())
        print(f"step {step:>{len(str(self._total))}}/{self._total}  {shown}", flush=True)  # noqa: T201 - its purpose

    def flush(self) -> None:
        """Do nothing: lines are flushed as they are printed."""

    def state(self) -> State:
        """No state: there is nothing to continue."""
        return {}

    def close(self, status: Literal["finished", "stopped", "failed"]) -> None:
        """Do nothing: the last line was printed already."""


def _format(name: str, value: float) -> str:
    if name == "lr":
        return f"{value:.2e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
