"""Files in the directory of a run: its job, plugins and programs, and its ending once it is done. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from d9d_core.job_file.job import JobConfig
from d9d_core.job_file.reading import write_yaml
from d9d_core.program.text import format_programs
from d9d_core.registry.manifest import Manifest
from d9d_core.schedule import Program
from d9d_core.untrusted import parse_json, read_regular
from d9d_weights.files.atomic import clear, replace, sync_tree, write_json, write_text

JOB, PLUGINS = "job.yaml", "plugins.json"
#: Files of the tokenizer of the run's data, from which its checkpoints are used without that data.
TOKENIZER = "tokenizer"
#: Programs of the ranks of a pipeline, a line for each.
PROGRAMS = "programs.txt"
#: Ending of a run that has done all that its job asks for.
FILE = "finished.json"


def write_start(
    job: JobConfig, manifest: Manifest, programs: Sequence[Program], save_assets: Callable[[Path], None]
) -> None:
    """Write a run's directory at its start: the job, all defaults filled in, plugins, tokenizer, pipeline programs.

    The run is not done then.

    Args:
        job: of the run.
        manifest: of the loaded plugins.
        programs: of all ranks along ``pp``; empty without a pipeline.
        save_assets: writes the tokenizer of the data into the directory that it is given.
    """
    directory = job.run.directory
    directory.mkdir(parents=True, exist_ok=True)
    clear_ending(directory)
    write_text(directory / JOB, write_yaml(job.resolved()))
    write_json(directory / PLUGINS, {"digest": manifest.digest, "plugins": manifest.to_json()})
    _write_tokenizer(directory / TOKENIZER, save_assets)
    if programs:
        write_text(directory / PROGRAMS, format_programs(programs) + "\n")
    else:  # an earlier start may have had another layout
        (directory / PROGRAMS).unlink(missing_ok=True)


def _write_tokenizer(target: Path, save_assets: Callable[[Path], None]) -> None:
    draft = target.with_name(f".{target.name}.tmp")
    clear(draft)
    clear(target)
    draft.mkdir()
    save_assets(draft)
    if any(draft.iterdir()):
        sync_tree(draft)
        replace(target, draft)
    else:  # datasets without a text
        draft.rmdir()


def clear_ending(directory: Path) -> None:
    """Remove the ending of an earlier start."""
    (directory / FILE).unlink(missing_ok=True)


def write_ending(directory: Path, step: int, total: int, reason: str | None) -> None:
    """Write that a run is done, which is the last that it does.

    Args:
        directory: of the run.
        step: optimizer steps done.
        total: steps that the job asked for, or that its epochs have.
        reason: why a subscriber ended the run before that.
    """
    write_json(directory / FILE, {"step": step, "steps": total, "reason": reason})


def read_ending(directory: Path) -> Mapping[str, Any] | None:
    """Ending of a run: ``step``, ``steps`` and ``reason``; ``None`` if it is not done, or its file is damaged."""
    try:
        values = parse_json(read_regular(directory / FILE, links="near"))
    except (OSError, ValueError):
        return None
    sound = isinstance(values, dict) and all(type(values.get(name)) is int for name in ("step", "steps"))
    return values if sound else None
