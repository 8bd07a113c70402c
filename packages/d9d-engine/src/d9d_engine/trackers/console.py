"""Console tracker: one line of text per logged step."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from shutil import get_terminal_size
from typing import Literal

from d9d_core.terminal.console import folded
from d9d_core.tracker import RunInfo
from d9d_core.types import State
from d9d_core.untrusted import visible

from d9d_engine.trackers.config import ConsoleConfig


class ConsoleTracker:
    """Tracker that prints to standard output."""

    def __init__(self, config: ConsoleConfig) -> None:
        self._config = config

    def open(self, run: RunInfo, state: State | None) -> ConsoleRun:  # noqa: ARG002 - the console has no state
        """Return the object that prints the values of a run."""
        if run.description:
            _print(f"{run.name}: {run.description}")
        return ConsoleRun(run.total_steps, self._config.series)


class ConsoleRun:
    """Prints the values of one run, for the tracker ``console``.

    Args:
        total_steps: number of steps of the run.
        series: patterns of the series to show; ``None`` for the default series.
    """

    def __init__(self, total_steps: int, series: Sequence[str] | None = None) -> None:
        self._total = total_steps
        self._series = series
        self._said = series is not None

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Print one line; the first time that series are left out, print their names too."""
        shown = {name: value for name, value in values.items() if self._shows(name)}
        if shown:
            begin = f"step {step:>{len(str(self._total))}}/{self._total}"
            _print(_lines(begin, [_format(name, value) for name, value in shown.items()]))
        hidden = [name for name in values if "/" in name and name not in shown]
        if hidden and not self._said:
            self._said = True
            how = "trackers: [{name: console, series: ['*']}] shows all"
            _print(f"not shown: {', '.join(hidden)} ({how})")

    def _shows(self, name: str) -> bool:
        if self._series is None:
            return ("/" not in name and name != "tokens") or name.startswith("eval/")
        return any(fnmatchcase(name, pattern) for pattern in self._series)

    def flush(self) -> None:
        """Do nothing: each line is flushed when printed."""

    def state(self) -> State:
        return {}

    def close(self, status: Literal["finished", "stopped", "failed"]) -> None:
        """Do nothing: all lines are printed."""


def _print(text: str) -> None:
    with suppress(OSError):  # a full disk or a closed terminal must not end the run
        print(folded(visible(text)), flush=True)  # noqa: T201 - console output is the purpose


def _lines(begin: str, parts: Sequence[str]) -> str:
    """Join the parts of a line; a terminal that is too narrow gets several lines, broken between parts."""
    width = get_terminal_size().columns if sys.stdout.isatty() else math.inf
    lines = [begin]
    for part in parts:
        if len(lines[-1]) + 2 + len(part) > width and lines[-1].strip():
            lines.append(" " * len(begin))
        lines[-1] += f"  {part}"
    return "\n".join(lines)


def _format(name: str, value: float) -> str:
    if name == "lr":
        return f"{name} {value:.2e}"
    number = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{number} tokens/s" if name == "tokens_per_second" else f"{name} {number}"
