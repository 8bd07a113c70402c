"""Files in a run's directory: job, plugins, facts, programs, and how the run ended. Imports no torch.

A start is one launch of the run's command; a run that was resumed has had several starts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from d9d_core.job_file.job import JobConfig
from d9d_core.job_file.reading import write_yaml
from d9d_core.launcher import EXIT_FAILED
from d9d_core.program.text import format_programs
from d9d_core.registry.manifest import Manifest
from d9d_core.schedule import Program
from d9d_core.untrusted import parse_json, read_regular
from d9d_weights.files.atomic import clear, replace, sync_tree, write_json, write_text

from d9d_engine.supervision.failure import Failure, headline

JOB, PLUGINS = "job.yaml", "plugins.json"
#: Folder with the tokenizer of the run's data, so that checkpoints can be used without the data.
TOKENIZER = "tokenizer"
#: File with the programs of the pipeline ranks, one line per rank.
PROGRAMS = "programs.txt"
#: File with facts of the start that reports show, such as the number of parameters.
FACTS = "facts.json"
#: Name of an earlier job file of a run that was continued with another job; the number is the first step that the
#: earlier job trained.
KEPT_JOB = "job-from-step-{}.yaml"
#: File that marks a finished run.
FILE = "finished.json"
#: File with the error that ended the last start.
FAILURE = "failed.json"
#: File with the stop request that ended the last start.
STOP = "stopped.json"
#: Files that say how the last start ended.
ENDINGS = (FILE, FAILURE, STOP)


@dataclass(frozen=True, slots=True)
class RunFailure:
    """Error that ended a run.

    Attributes:
        error: error in one line.
        status: exit status of the rank that failed; 2 means an error that a restart would repeat; ``None`` if unknown.
    """

    error: str
    status: int | None


def write_start(
    job: JobConfig,
    manifest: Manifest,
    programs: Sequence[Program],
    save_assets: Callable[[Path], None],
    step: int = 0,
    trains: bool = True,
    facts: Mapping[str, Any] | None = None,
) -> None:
    """Write a run's directory at its start: the job with all defaults, plugins, facts, tokenizer, pipeline programs.

    Removes the files by which an earlier start marked the run as finished, stopped or failed. In a directory with a
    job file, a start that trains no step only removes ``failed.json``, because the other files say how the weights were
    trained.

    Args:
        job: job of the run.
        manifest: manifest of the loaded plugins.
        programs: programs of all ranks along ``pp``; empty without a pipeline.
        save_assets: writes the data's tokenizer into a given directory.
        step: number of steps done before this start.
        trains: whether the run has steps left to train.
        facts: facts of this start, as JSON values; see :func:`~d9d_engine.compose.facts.start_facts`.
    """
    directory = job.run.directory
    if not trains and (directory / JOB).exists():
        (directory / FAILURE).unlink(missing_ok=True)
        return
    directory.mkdir(parents=True, exist_ok=True)
    clear_ending(directory)
    _write_job(directory, write_yaml(job.resolved()), step)
    write_json(directory / PLUGINS, {"digest": manifest.digest, "plugins": manifest.to_json()})
    write_json(directory / FACTS, facts or {})
    _write_tokenizer(directory / TOKENIZER, save_assets)
    if programs:
        write_text(directory / PROGRAMS, format_programs(programs) + "\n")
    else:  # this start has no pipeline; an earlier start with one may have left its programs
        (directory / PROGRAMS).unlink(missing_ok=True)


def _write_job(directory: Path, text: str, step: int) -> None:
    """Write ``job.yaml``; if another job trained the earlier steps, also one file per job, named by its first step."""
    current = directory / JOB
    kept = {first: directory / KEPT_JOB.format(first) for first in kept_jobs(directory)}
    for first in [first for first in kept if first >= step]:  # these steps are trained again
        kept.pop(first).unlink()
    before = kept[max(kept)] if kept else current
    if step and before.exists() and (old := before.read_text("utf-8", "replace")) != text:
        write_text(directory / KEPT_JOB.format(max(kept, default=0)), old)
        write_text(directory / KEPT_JOB.format(step), text)
    write_text(current, text)


def kept_jobs(directory: Path) -> list[int]:
    """First step of each job that trained a part of the run, ascending; empty if one job trained all steps."""
    prefix, suffix = KEPT_JOB.split("{}")
    names = (file.name.removeprefix(prefix).removesuffix(suffix) for file in directory.glob(KEPT_JOB.format("*")))
    return sorted(int(name) for name in names if name.isdecimal())


def _write_tokenizer(target: Path, save_assets: Callable[[Path], None]) -> None:
    draft = target.with_name(f".{target.name}.tmp")
    clear(draft)
    clear(target)
    draft.mkdir()
    save_assets(draft)
    if any(draft.iterdir()):
        sync_tree(draft)
        replace(target, draft)
    else:  # the dataset has no tokenizer
        draft.rmdir()


def clear_ending(directory: Path) -> None:
    """Remove the files by which an earlier start marked the run as finished, stopped or failed."""
    for name in ENDINGS:
        (directory / name).unlink(missing_ok=True)


def write_failure(directory: Path, step: int, error: BaseException, who: str = "", rank: int = 0) -> None:
    """Write the error that ended a run, in one line; a failed write is ignored. Any rank may call this.

    The first failure of a start is kept, because later ones may be its consequences; only an error of the job, which a
    restart would repeat, replaces another failure.

    Args:
        directory: directory of the run.
        step: number of optimizer steps done.
        error: exception that ended the run.
        who: rank and machine that failed; empty for the only process, or if the error names it.
        rank: rank of this process; several ranks may write at the same time.
    """
    status, earlier = Failure.of(error).exit_code, read_failure(directory)
    if earlier is not None and (status != EXIT_FAILED or earlier.status == EXIT_FAILED):
        return
    text = f"{who}: {headline(error)}" if who else headline(error)
    with suppress(OSError):
        write_json(directory / FAILURE, {"step": step, "error": text, "status": status}, writer=f"rank-{rank}")


def write_stop(directory: Path, step: int, total: int, request: str | None) -> None:
    """Write the file that marks a run as stopped and saved; a failed write is ignored.

    Args:
        directory: directory of the run.
        step: number of optimizer steps done.
        total: number of steps that the job asks for, or that its epochs have.
        request: name of the signal that asked to stop; ``None`` if the caller closed the run.
    """
    with suppress(OSError):
        write_json(directory / STOP, {"step": step, "steps": total, "request": request})


def read_failure(directory: Path) -> RunFailure | None:
    """Read the error that ended a run; ``None`` if the file is missing or damaged."""
    try:
        values = parse_json(read_regular(directory / FAILURE, links="near"))
    except (OSError, ValueError):
        return None
    error, status = (values.get("error"), values.get("status")) if isinstance(values, dict) else (None, None)
    return RunFailure(error, status if type(status) is int else None) if isinstance(error, str) else None


def read_stop(directory: Path) -> Mapping[str, Any] | None:
    """Read ``step``, ``steps``, ``request`` of a stopped run; ``None`` if the file is missing or damaged."""
    return _read_counts(directory / STOP)


def write_ending(directory: Path, step: int, total: int, reason: str | None) -> None:
    """Write the file that marks a run as finished; the last write of a run.

    Args:
        directory: directory of the run.
        step: number of optimizer steps done.
        total: number of steps that the job asks for, or that its epochs have.
        reason: why a subscriber ended the run early, if one did.
    """
    write_json(directory / FILE, {"step": step, "steps": total, "reason": reason})


def read_ending(directory: Path) -> Mapping[str, Any] | None:
    """Read ``step``, ``steps``, ``reason`` of a finished run; ``None`` if the file is missing or damaged."""
    return _read_counts(directory / FILE)


def _read_counts(file: Path) -> Mapping[str, Any] | None:
    try:
        values = parse_json(read_regular(file, links="near"))
    except (OSError, ValueError):
        return None
    sound = isinstance(values, dict) and all(type(values.get(name)) is int for name in ("step", "steps"))
    return values if sound else None
