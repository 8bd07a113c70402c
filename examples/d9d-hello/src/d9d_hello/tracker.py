"""Tracker ``csv``: a file with the columns step, series and value."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from d9d_core.tracker import RunInfo
from d9d_core.types import State

from d9d_hello.config import CsvConfig


class CsvTracker:
    """Tracker that opens ``<run>/metrics.csv``."""

    def __init__(self, config: CsvConfig) -> None:
        self._config = config

    def open(self, run: RunInfo, state: State | None) -> CsvRun:  # noqa: ARG002 - the file itself is the state
        """Create the file, or truncate it to the step from which the run resumes."""
        path = run.directory / "metrics.csv"
        rows = list(csv.reader(path.read_text().splitlines()))[1:] if run.resumed_step and path.exists() else []
        # A kill may have truncated the last row, so the values of its step are incomplete.
        return CsvRun(path, [row for row in rows if len(row) == 3 and int(row[0]) <= run.resumed_step])


class CsvRun:
    """CSV file of one run, opened for writing."""

    def __init__(self, path: Path, rows: list[list[str]]) -> None:
        self._file = path.open("w", newline="")
        self._writer = csv.writer(self._file)
        self._writer.writerows([["step", "series", "value"], *rows])

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write one row per value."""
        self._writer.writerows([step, series, value] for series, value in values.items())

    def flush(self) -> None:
        """Flush the file; called before each checkpoint, so that the rows survive a crash."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def state(self) -> State:
        """Empty state: the file itself is enough to resume."""
        return {}

    def close(self, status: Literal["finished", "stopped", "failed"]) -> None:  # noqa: ARG002 - a row has no status
        """Close the file."""
        self._file.close()
