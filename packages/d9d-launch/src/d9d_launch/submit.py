"""Submission of a job: checks, the files and the command, and the record in the run's directory."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from d9d_core.errors import LaunchError
from d9d_core.job import JobFile
from d9d_core.job_file.reading import write_yaml
from d9d_core.launcher import Launcher, LaunchRequest, Submission
from d9d_weights.files.atomic import write_text

from d9d_launch.record import FOLDER, JOB, SubmissionRecord, digest_of, find_endings


def request_for(job: JobFile, file: Path, nodes: int, processes: int, options: list[str]) -> LaunchRequest:
    """Build the request to train a copy of a job, with all defaults and overrides.

    The copy has the checked text; the job file may change while the submission waits.

    Args:
        job: job, loaded for ``nodes * processes`` processes.
        file: job file.
        nodes: number of machines.
        processes: number of processes on each.
        options: further arguments of ``d9d train``.

    Raises:
        LaunchError: a path of the request has a control character.
        JobError: the job file cannot be read any more.
    """
    folder = job.run.directory.absolute() / FOLDER
    return LaunchRequest(
        name=job.run.name,
        command=(sys.executable, "-m", "d9d_core", "train", str(folder / JOB), *options),
        job=write_yaml(job.resolved()),
        job_file=folder / JOB,
        folder=folder,
        working_directory=Path.cwd(),
        nodes=nodes,
        processes=processes,
        device=job.device,
        source=file.absolute(),
        source_sha256=digest_of(file),
    )


def dry_run(request: LaunchRequest, submission: Submission) -> str:
    """Text that shows the path and content of each file of a submission, and the command that submits it."""
    import shlex

    files = {request.job_file: request.job, **submission.files}
    parts = [f"# {path}\n{text.rstrip()}\n" for path, text in files.items()]
    return "\n".join([*parts, f"# command\n{shlex.join(submission.command)}"])


def refuse_second(launcher: Launcher, engine: str, folder: Path) -> None:
    """Check that the run's newest submission, if it went to this engine, has ended.

    Raises:
        LaunchError: this submission waits or runs, or its record is damaged.
    """
    record = SubmissionRecord.read(folder)
    if record is None or record.engine != engine:
        return
    state = launcher.status(record.identifier, folder, 0).state
    if state in ("waiting", "running"):
        raise LaunchError(
            f"this run was submitted to {engine} as {record.identifier}, which is {state}; cancel that submission with "
            f"d9d launch cancel {folder.parent}, or choose another run.name"
        )


@dataclass(frozen=True)
class Engine:
    """Engine that a submission goes to.

    Attributes:
        name: name of the launcher.
        options: all fields of the launcher's config, as JSON values.
        launcher: launcher, which submits to the engine.
    """

    name: str
    options: Mapping[str, Any]
    launcher: Launcher


def submit(engine: Engine, request: LaunchRequest, submission: Submission) -> str:
    """Write the files of a submission, hand it to the engine, and record it; return the engine's identifier.

    Raises:
        LaunchError: the engine refused the submission; the files stay.
    """
    request.folder.mkdir(parents=True, exist_ok=True)
    for path, text in {request.job_file: request.job, **submission.files}.items():
        write_text(path, text)
    earlier = find_endings(request.folder.parent)  # the engine may start the job at once
    identifier = engine.launcher.submit(submission)
    SubmissionRecord(
        engine=engine.name,
        options=engine.options,
        identifier=identifier,
        nodes=request.nodes,
        processes=request.processes,
        job=str(request.source),
        digest=request.source_sha256,
        command=list(submission.command),
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        earlier=earlier,
    ).write(request.folder)
    return identifier
