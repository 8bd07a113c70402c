"""Storage of an inference run: written parts, progress, and the output file joined from the parts.

Files of the run's directory::

        inference.json        job, and columns of the output
        progress.json         number of finished samples, of all samples, and the state of the data stream after them
        parts/000000000512-000000000128.jsonl, .json    rows of 128 samples starting with sample 512, and their facts
        output.jsonl          all rows, once the run is finished
        summary.json          results over all rows

Once a part is on disk, first the part and then its description get their final names. Progress counts only parts that
have both, so a killed run continues after the last counted sample, on any number of ranks.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from d9d_core.config import speakable
from d9d_core.errors import CheckpointError, JobError
from d9d_core.inference import Columns, Writer
from d9d_core.types import State
from d9d_weights.files.atomic import clear, replacing, write_json
from d9d_weights.files.lock import exclusive

_RECORD, _PROGRESS, _SUMMARY, _PARTS = "inference.json", "progress.json", "summary.json", "parts"
_DIGITS = 12


@dataclass(frozen=True, slots=True)
class PartFacts:
    """Description of a part, which is the rows of consecutive samples in one file.

    Attributes:
        samples: number of samples in the part.
        rows: number of rows in the part.
        sums: the task's sums over these rows (:meth:`d9d_core.inference.InferenceTask.tally`).
    """

    samples: int
    rows: int
    sums: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Standing:
    """Progress of an inference run.

    Attributes:
        samples: number of finished samples, counted from the first sample.
        stream: state of the data stream after these samples; ``None`` at the start.
        summary: number of rows, and the task's results over all rows; ``None`` until the output is complete.
    """

    samples: int = 0
    stream: State | None = None
    summary: Mapping[str, Any] | None = None

    @property
    def finished(self) -> bool:
        """Whether the output is complete."""
        return self.summary is not None


class PartStore:
    """Storage of an inference run's parts, in a directory shared by all ranks.

    Args:
        directory: directory of the run.
        writer: writer, which writes parts and joins them.
    """

    def __init__(self, directory: Path, writer: Writer) -> None:
        self.directory = directory
        self._writer = writer
        self._parts = directory / _PARTS
        self._owned: AbstractContextManager[object] | None = None

    @property
    def output(self) -> Path:
        """Output file with all rows of a finished run."""
        return self.directory / f"output{self._writer.suffix}"

    def own(self) -> None:
        """Take ownership of the directory, until :meth:`opened` ends; no effect if already owned.

        Raises:
            CheckpointError: another process owns the directory.
        """
        if self._owned is None:
            self._parts.mkdir(parents=True, exist_ok=True)
            owned = exclusive(self.directory / ".inference.lock", f"{self.directory} belongs to a running process")
            owned.__enter__()
            self._owned = owned

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Own the directory inside the block, so that no other process writes it.

        Raises:
            CheckpointError: another process owns the directory.
        """
        self.own()
        try:
            yield
        finally:
            owned, self._owned = self._owned, None
            if owned is not None:
                owned.__exit__(None, None, None)

    def begin(self, record: Mapping[str, Any]) -> Standing:
        """Check that the directory belongs to the job, remove unfinished parts, and return the progress of the run.

        Args:
            record: JSON values that determine the output rows.

        Raises:
            JobError: the directory has results of another job, or an output file of unknown origin.
            CheckpointError: a file is damaged.
        """
        before = self._read(_RECORD)
        if before is None:
            if self.output.exists():
                raise JobError(
                    f"run.name: {self.output} exists, but no inference run has written it; choose another run.name, "
                    "or move the file away"
                )
            clear(self._parts)
            self._parts.mkdir()
            write_json(self.directory / _RECORD, dict(record))
            return Standing()
        now = json.loads(json.dumps(record))
        # Differences of columns are left out, because the job determines the columns.
        if changed := [where for where in _differences(before, now) if not where.startswith("columns")]:
            raise JobError(
                f"run.name: {self.directory} has results of a job with another {', '.join(changed[:5])}; choose "
                "another run.name, or remove the directory to start from scratch"
            )
        progress = self._read(_PROGRESS) or {"samples": 0, "stream": None}
        summary = self._read(_SUMMARY)
        if summary is not None and self.output.exists():
            clear(self._parts)
            return Standing(progress["samples"], progress["stream"], summary)
        self._prune(progress["samples"])
        return Standing(progress["samples"], progress["stream"])

    def write(self, first: int, samples: int, rows: Columns, sums: Mapping[str, float]) -> None:
        """Write the rows of ``samples`` samples starting with number ``first``; from any rank, in any order."""
        path = self._part(first, samples)
        with replacing(path) as temporary:
            self._writer.write(temporary, rows)
        count = len(next(iter(rows.values())))
        write_json(path.with_suffix(".json"), {"samples": samples, "rows": count, "sums": speakable(dict(sums))})

    def has(self, first: int, samples: int) -> bool:
        """Whether the part with ``samples`` samples starting with number ``first`` is complete."""
        return self._part(first, samples).with_suffix(".json").exists()

    def advance(self, samples: int, total: int, stream: State) -> None:
        """Record that all parts of the first ``samples`` of ``total`` samples are complete."""
        write_json(self.directory / _PROGRESS, {"samples": samples, "of": total, "stream": stream})

    def facts(self, samples: int) -> list[tuple[int, PartFacts]]:
        """List parts that together cover the samples below ``samples``: first sample and facts of each, in order.

        Parts may overlap if a rank of an earlier start, which divided the samples differently, was still running. Any
        chain of parts without gaps is correct, as the same samples have the same rows.

        Raises:
            CheckpointError: parts are missing, or the description of a part is damaged.
        """
        # Number of samples that a chain of parts covers without gaps -> first sample and name of the chain's last part.
        before: dict[int, tuple[int, str] | None] = {0: None}
        named = self._named(samples)
        for first, name in named:
            if first in before:
                before.setdefault(first + int(name.partition("-")[2]), (first, name))
        if samples not in before:
            end = max(before)
            after = min((first for first, _ in named if first > end), default=samples)
            raise CheckpointError(
                f"{self._parts}: rows of the samples {end} to {after} are missing; remove {self.directory} to "
                "start from scratch"
            )
        found: list[tuple[int, PartFacts]] = []
        last = before[samples]
        while last is not None:
            first, name = last
            found.append((first, _facts_of(self._read(f"{_PARTS}/{name}.json"))))
            last = before[first]
        return found[::-1]

    def finish(self, samples: int, summary: Mapping[str, Any]) -> None:
        """Join all parts to the output file, and remove them.

        Raises:
            CheckpointError: parts are missing, or the description of a part is damaged.
        """
        if not self.output.exists() or any(True for _ in self._named(samples)):
            parts = [self._part(first, part.samples) for first, part in self.facts(samples)]
            with replacing(self.output) as temporary:
                self._writer.join(parts, temporary)
        write_json(self.directory / _SUMMARY, dict(summary))
        clear(self._parts)

    def _part(self, first: int, samples: int) -> Path:
        return self._parts / f"{first:0{_DIGITS}d}-{samples:0{_DIGITS}d}{self._writer.suffix}"

    def _named(self, samples: int) -> list[tuple[int, str]]:
        names = sorted(entry.name.removesuffix(".json") for entry in os.scandir(self._parts) if _is_facts(entry.name))
        firsts = [(int(name.partition("-")[0]), name) for name in names]
        return [(first, name) for first, name in firsts if first < samples]

    def _prune(self, samples: int) -> None:
        """Remove parts after the finished samples, and unfinished parts."""
        self._parts.mkdir(exist_ok=True)
        kept = {name for _, name in self._named(samples)}
        for entry in os.scandir(self._parts):
            if entry.name.partition(".")[0] not in kept:
                Path(entry.path).unlink()

    def _read(self, name: str) -> Any:
        path = self.directory / name
        try:
            return json.loads(path.read_text("utf-8"))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise CheckpointError(
                f"{path} is damaged ({error}); remove {self.directory} to start from scratch"
            ) from error


def _facts_of(values: Mapping[str, Any]) -> PartFacts:
    sums = {name: float(value) for name, value in values["sums"].items()}  # NaN and infinity are stored as strings
    return PartFacts(values["samples"], values["rows"], sums)


def _is_facts(name: str) -> bool:
    stem, _, suffix = name.partition(".")
    return suffix == "json" and stem.replace("-", "").isdecimal()


def _differences(before: Any, now: Any, where: str = "") -> Iterator[str]:
    """Yield the fields in which two jobs differ, as dotted locations in the job file."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for name in sorted(before.keys() | now.keys()):
            yield from _differences(before.get(name), now.get(name), f"{where}.{name}" if where else name)
    elif before != now:
        yield where
