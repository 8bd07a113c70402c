"""Record of a run, read from the files in its directory."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from d9d_core.errors import JobError
from d9d_core.job_file.document import Document
from d9d_core.untrusted import parse_json, read_regular
from d9d_engine.run.directory import JOB, read_ending, read_failure
from d9d_engine.trackers.lines import read_lines
from d9d_weights.files.lock import is_held

#: File in a sweep's directory with the first error line of each run that failed in its last start.
FAILURES = "failures.json"
_STEP = re.compile(r"step-(\d+)")
Status = Literal["running", "finished", "failed", "stopped", "started", "damaged"]


@dataclass(frozen=True)
class RunRecord:
    """Record of a local run, read from its directory.

    Attributes:
        directory: directory of the run.
        job: values of the job, all defaults filled in; empty if unreadable.
        lines: logged values by series, one mapping for each logged step, with the key ``step``.
        saved: step of the newest checkpoint; 0 without one.
        error: first line of the error that ended the last start.
        ending: contents of ``finished.json``; ``None`` if the run is unfinished.
    """

    directory: Path
    job: Mapping[str, Any]
    lines: Sequence[Mapping[str, Any]]
    saved: int
    error: str | None = None
    ending: Mapping[str, Any] | None = None

    @classmethod
    def read(cls, directory: Path) -> RunRecord:
        """Read a run; damaged files count as missing."""
        job: Mapping[str, Any] = {}
        with suppress(JobError):
            job = Document.read(directory / JOB, "near").values
        lines, saved = list(read_lines(directory / "metrics.jsonl")), _saved(_checkpoints(directory, job))
        failure = read_failure(directory)
        error = failure.error if failure else read_failures(directory.parent).get(directory.name)
        return cls(directory, job, lines, saved, error, read_ending(directory))

    @property
    def name(self) -> str:
        """Name of the run's directory."""
        return self.directory.name

    @cached_property
    def status(self) -> Status:
        """Status of the run. An unfinished run with no process or error is ``stopped``, or ``started`` if not saved."""
        if not self.job:
            return "damaged"
        checkpoints = _checkpoints(self.directory, self.job)
        if checkpoints is not None and is_held(checkpoints / ".lock"):
            return "running"
        if self.ending is not None:
            return "finished"
        if self.error is not None:
            return "failed"
        return "stopped" if self.saved else "started"

    @property
    def total(self) -> int | None:
        """Number of steps of the whole run; ``None`` for an unfinished run that counts in epochs."""
        steps = self.job.get("steps") if self.ending is None else self.ending["steps"]
        return steps if isinstance(steps, int) else None

    @property
    def step(self) -> int:
        """Number of done steps, as known from logs and checkpoints."""
        return max(self.saved, *(int(line["step"]) for line in self.lines), 0)

    @property
    def started(self) -> datetime | None:
        """Time of the last start."""
        with suppress(OSError):
            return datetime.fromtimestamp((self.directory / JOB).stat().st_mtime, UTC)
        return None

    @property
    def seconds(self) -> float:
        """Seconds of training in all starts, from tokens and their rate, without start-up, evaluation and saving."""
        total, before = 0.0, 0.0
        for line in self.lines:
            tokens, rate = line.get("tokens"), line.get("tokens_per_second")
            if isinstance(tokens, int | float) and isinstance(rate, int | float) and rate > 0:
                total, before = total + max(tokens - before, 0) / rate, tokens
        return total

    def points(self, series: str) -> list[tuple[int, float]]:
        """Points (step, value) of a logged series."""
        pairs = [(line["step"], line.get(series)) for line in self.lines]
        return [(step, value) for step, value in pairs if isinstance(value, int | float)]

    def last(self, series: str) -> float | None:
        """Last value of a logged series."""
        points = self.points(series)
        return points[-1][1] if points else None

    def best(self, series: str) -> float | None:
        """Smallest value of a logged series."""
        return min((value for _, value in self.points(series)), default=None)


def find_runs(locations: Iterable[Path]) -> list[RunRecord]:
    """Read runs from directories of runs, or from directories that contain some.

    Raises:
        JobError: a location has no run.
    """
    found: dict[Path, RunRecord] = {}
    for location in locations:
        inside = [location] if (location / JOB).is_file() else sorted(file.parent for file in location.glob(f"*/{JOB}"))
        if not inside:
            what = "contains no run" if location.is_dir() else "is no directory"
            raise JobError(f"{location} {what}; give the directory of a run (with {JOB}), or the directory above")
        found |= {directory.resolve(): RunRecord.read(directory) for directory in inside}
    return list(found.values())


def unique_names(records: Sequence[RunRecord]) -> list[str]:
    """Names of runs, with their parent directories if names are not unique."""
    for name_of in (_own_name, _name_within):
        names = [name_of(record) for record in records]
        if len(set(names)) == len(names):
            return names
    return [str(record.directory) for record in records]


def _own_name(record: RunRecord) -> str:
    return record.name


def _name_within(record: RunRecord) -> str:
    return f"{record.directory.resolve().parent.name}/{record.name}"


def read_failures(directory: Path) -> dict[str, str]:
    """Error of each failed run of a sweep, by name; empty if the file is missing or damaged."""
    try:
        values = parse_json(read_regular(directory / FAILURES, links="near"))
    except (OSError, ValueError):
        return {}
    return {str(name): str(error) for name, error in values.items()} if isinstance(values, dict) else {}


def _checkpoints(directory: Path, job: Mapping[str, Any]) -> Path | None:
    """Local directory of a run's checkpoints; ``None`` if they are remote."""
    section = job.get("checkpoint")
    given = section.get("dir") if isinstance(section, Mapping) else None
    if not isinstance(given, str):
        return directory / "checkpoints"
    return None if "://" in given else Path(given)


def _saved(checkpoints: Path | None) -> int:
    if checkpoints is None:
        return 0
    found = [_STEP.fullmatch(file.parent.name) for file in checkpoints.glob("step-*/manifest.json")]
    return max((int(match[1]) for match in found if match), default=0)
