"""Record of a run, read from what it has left in its directory."""

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
from d9d_engine.run.directory import JOB, read_ending
from d9d_engine.trackers.lines import read_lines
from d9d_weights.files.lock import is_held

#: File beside the runs of a sweep: the first line of the error of each run that failed in its last start.
FAILURES = "failures.json"
_STEP = re.compile(r"step-(\d+)")
Status = Literal["running", "finished", "failed", "stopped", "started", "damaged"]


@dataclass(frozen=True)
class RunRecord:
    """Record of a run on this machine, read from its directory.

    Attributes:
        directory: of the run.
        job: values of its job, all defaults filled in; empty if they cannot be read.
        lines: logged values, each with ``step``.
        saved: step of its newest checkpoint; 0 without one.
        error: first line of the error that ended its last start, if a sweep started it.
        ending: what it has left at its end, if it has done all that its job asks for.
    """

    directory: Path
    job: Mapping[str, Any]
    lines: Sequence[Mapping[str, Any]]
    saved: int
    error: str | None = None
    ending: Mapping[str, Any] | None = None

    @classmethod
    def read(cls, directory: Path) -> RunRecord:
        """Read a run; what is damaged counts as absent."""
        job: Mapping[str, Any] = {}
        with suppress(JobError):
            job = Document.read(directory / JOB, "near").values
        lines, saved = list(read_lines(directory / "metrics.jsonl")), _saved(_checkpoints(directory, job))
        error = read_failures(directory.parent).get(directory.name)
        return cls(directory, job, lines, saved, error, read_ending(directory))

    @property
    def name(self) -> str:
        """Name of the run's directory."""
        return self.directory.name

    @cached_property
    def status(self) -> Status:
        """Status: ``failed`` in a sweep; ``stopped`` has a checkpoint to go on from, ``started`` has none."""
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
        """Steps of the whole run, if its job counts steps or the run is done."""
        steps = self.job.get("steps") if self.ending is None else self.ending["steps"]
        return steps if isinstance(steps, int) else None

    @property
    def step(self) -> int:
        """Steps that are done, as far as a log or a checkpoint says."""
        return max(self.saved, *(int(line["step"]) for line in self.lines), 0)

    @property
    def started(self) -> datetime | None:
        """Time of the last start."""
        with suppress(OSError):
            return datetime.fromtimestamp((self.directory / JOB).stat().st_mtime, UTC)
        return None

    @property
    def seconds(self) -> float:
        """Seconds of training over all starts, without start-up, evaluations and checkpoints: tokens by their rate."""
        total, before = 0.0, 0.0
        for line in self.lines:
            tokens, rate = line.get("tokens"), line.get("tokens_per_second")
            if isinstance(tokens, int | float) and isinstance(rate, int | float) and rate > 0:
                total, before = total + max(tokens - before, 0) / rate, tokens
        return total

    def points(self, series: str) -> list[tuple[int, float]]:
        """Steps and values of a logged series."""
        pairs = [(line["step"], line.get(series)) for line in self.lines]
        return [(step, value) for step, value in pairs if isinstance(value, int | float)]

    def last(self, series: str) -> float | None:
        """Last value of a logged series."""
        points = self.points(series)
        return points[-1][1] if points else None

    def best(self, series: str) -> float | None:
        """Least value of a logged series."""
        return min((value for _, value in self.points(series)), default=None)


def find_runs(locations: Iterable[Path]) -> list[RunRecord]:
    """Find runs: directories of runs, and all runs directly inside other directories.

    Raises:
        JobError: a location holds none.
    """
    found: dict[Path, RunRecord] = {}
    for location in locations:
        inside = [location] if (location / JOB).is_file() else sorted(file.parent for file in location.glob(f"*/{JOB}"))
        if not inside:
            what = "holds no run" if location.is_dir() else "is no directory"
            raise JobError(f"{location} {what}; name the directory of a run (with {JOB}), or the one above it")
        found |= {directory.resolve(): RunRecord.read(directory) for directory in inside}
    return list(found.values())


def unique_names(records: Sequence[RunRecord]) -> list[str]:
    """Names of runs; with their directory where two are alike."""
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
    """Errors of the runs of a sweep that failed, by name; none if the file is absent or damaged."""
    try:
        values = parse_json(read_regular(directory / FAILURES, links="near"))
    except (OSError, ValueError):
        return {}
    return {str(name): str(error) for name, error in values.items()} if isinstance(values, dict) else {}


def _checkpoints(directory: Path, job: Mapping[str, Any]) -> Path | None:
    """Directory of a run's checkpoints on this machine."""
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
