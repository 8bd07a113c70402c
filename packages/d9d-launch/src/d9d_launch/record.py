"""Record of a submission, in the run's directory."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from d9d_core.errors import JobError, LaunchError
from d9d_core.job_file.document import Document
from d9d_core.job_file.job import Run
from d9d_core.untrusted import Place, parse_json, read_regular
from d9d_engine.run.directory import ENDINGS
from d9d_weights.files.atomic import write_json
from pydantic import ValidationError

#: Subdirectory of a run's directory for the submission; its files: the record, and the copy of the job file.
FOLDER, RECORD, JOB = "launch", "submission.json", "job.yaml"
_REMEDY = (
    "find the state of the submission with the commands of the cluster, such as squeue or kubectl; then remove this "
    "file, to submit again"
)


@dataclass(frozen=True, kw_only=True)
class SubmissionRecord:
    """Record of the newest submission of a run.

    Attributes:
        engine: name of the launcher.
        options: all fields of the launcher's config.
        identifier: identifier that the engine gave.
        nodes, processes: number of machines, and of processes on each.
        job: absolute path of the job file.
        digest: SHA-256 of that file at the time of the submission.
        command: arguments of the command that submitted.
        time: time of the submission, in UTC.
        earlier: endings of earlier starts that the run's directory had at the submission: file -> its modification time
            in nanoseconds; see :func:`find_endings`.
    """

    engine: str
    options: Mapping[str, Any]
    identifier: str
    nodes: int
    processes: int
    job: str
    digest: str
    command: list[str]
    time: str
    earlier: Mapping[str, int] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write the record into the folder of the submission."""
        write_json(folder / RECORD, asdict(self))

    @classmethod
    def read(cls, folder: Path) -> SubmissionRecord | None:
        """Read the record in the folder of a submission; ``None`` if there is none.

        Raises:
            LaunchError: the record cannot be read, or is damaged.
        """
        try:
            values = parse_json(read_regular(folder / RECORD, links="near"))
            record = cls(**values)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as error:
            raise LaunchError(f"{folder / RECORD}: cannot be read: {error}; {_REMEDY}") from error
        texts = (record.engine, record.identifier, record.job, record.digest)
        if not all(isinstance(text, str) for text in texts) or not isinstance(record.earlier, dict):
            raise LaunchError(f"{folder / RECORD}: fields have wrong types; {_REMEDY}")
        return record

    def is_earlier(self, directory: Path, name: str) -> bool:
        """Whether a file about the end of a start was in the run's directory before the submission."""
        return name in self.earlier and find_endings(directory).get(name) == self.earlier[name]

    def job_change(self) -> str | None:
        """Sentence that says that the job file has changed or cannot be read any more; ``None`` if it is unchanged."""
        try:
            changed = digest_of(Path(self.job)) != self.digest
        except JobError:
            return f"{self.job} cannot be read any more"
        return f"{self.job} has changed since the submission" if changed else None


def find_endings(directory: Path) -> dict[str, int]:
    """Modification time in nanoseconds of each file about the end of a start, by name.

    The times are compared only for equality, because machines have different clocks.
    """
    found = {}
    for name in ENDINGS:
        with suppress(OSError):
            found[name] = (directory / name).stat().st_mtime_ns
    return found


def digest_of(job: Path) -> str:
    """SHA-256 of a job file.

    Raises:
        JobError: the file cannot be read.
    """
    try:
        return hashlib.sha256(read_regular(job)).hexdigest()
    except OSError as error:
        raise JobError(f"{job}: cannot be read: {error.strerror or error}") from error


def run_directory(location: Path, overrides: list[str]) -> Path:
    """Find the directory of a run that the command line names by its job file or by the directory itself.

    Args:
        location: job file, or directory of the run.
        overrides: assignments ``section.field=value`` for a job file.

    Raises:
        JobError: the job file cannot be read, or its section ``run`` is wrong.
    """
    if Place.of(location).kind == "run" or (location / FOLDER / RECORD).is_file():
        return location.absolute()
    document = Document.read(location).override(overrides)
    try:
        return Run.model_validate(document.values.get("run") or {}).directory.absolute()
    except ValidationError as error:
        raise JobError(f"{location}: the section 'run' is wrong; to see why: d9d check {location}") from error


def find_submission(location: Path, overrides: list[str], engine: str | None) -> tuple[Path, SubmissionRecord]:
    """Find the directory of a run, and the record of its newest submission.

    Args:
        location: job file, or directory of the run.
        overrides: assignments ``section.field=value`` for a job file.
        engine: launcher that the submission must have; ``None`` for any.

    Raises:
        LaunchError: the run has no submission, its newest submission is to another engine, or the record is damaged.
        JobError: the job file cannot be read, or its section ``run`` is wrong.
    """
    directory = run_directory(location, overrides)
    record = SubmissionRecord.read(directory / FOLDER)
    if record is None:
        raise LaunchError(f"{directory} has no submission; d9d launch submit makes one (give the same --set options)")
    if engine is not None and engine.rpartition("/")[2] != record.engine.rpartition("/")[2]:
        raise LaunchError(f"--engine {engine}: {directory} was submitted to {record.engine}; leave out --engine")
    return directory, record
