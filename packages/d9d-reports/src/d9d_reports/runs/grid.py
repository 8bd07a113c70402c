"""Grid of a sweep: every combination of values, as loaded and checked jobs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from d9d_core.errors import D9dError, JobError
from d9d_core.registry.policy import PluginPolicy
from d9d_core.registry.registry import Registry
from d9d_engine.job import Job
from d9d_engine.run.directory import JOB

from d9d_reports.runs.differences import differing
from d9d_reports.runs.record import RunRecord

#: Sections that the sweep sets for each run, or that must be equal for all runs.
_OWN = ("run", "plugins")
#: Sections and fields about layout, output and length, which may change between starts of a run.
_HOW = (
    "device", "mesh", "parallel", "pipeline", "kernels", "metrics", "trackers", "subscribers", "logging", "checkpoint",
    "loading", "timeouts",
)  # fmt: skip
_CHANGEABLE = ("steps", "epochs", "batch.microbatch", "gradients.bucket_mib")
_OPEN, _CLOSE = "[{(", "]})"
#: Largest number of combinations; more are taken for a mistake.
_MOST = 10_000
#: Largest number of problems that a message lists.
_SHOWN = 10


@dataclass(frozen=True)
class SweepRun:
    """Run of a sweep: one combination of values of its grid.

    Attributes:
        name: name of the run, made from its values.
        overrides: assignments for ``--set``, including the run's name and directory.
        job: validated job.
    """

    name: str
    overrides: tuple[str, ...]
    job: Job

    @property
    def directory(self) -> Path:
        return self.job.run.directory

    def is_finished(self) -> bool:
        """Whether the run has finished the job, with the same number of steps or epochs.

        Raises:
            JobError: the run's directory belongs to another job.
        """
        if not (self.directory / JOB).is_file():
            return False
        record, mine = RunRecord.read(self.directory), self.job.resolved()
        other = differing([_lasting(record.job), _lasting(mine)], leave_out=_CHANGEABLE)
        if record.job and other:
            name, (there, here) = next(iter(other.items()))
            raise JobError(
                f"{self.directory} belongs to another job: {name} is {there!r} there and {here!r} here; choose another "
                "directory with --dir, or remove that one"
            )
        same = all(record.job.get(field) == mine[field] for field in ("steps", "epochs"))
        return same and record.status == "finished"


def combine(
    job: Path,
    grids: Sequence[str],
    overrides: Sequence[str],
    policy: PluginPolicy,
    directory: Path | None,
    checked: Callable[[Callable[[int | None, bool], Job]], Job],
) -> list[SweepRun]:
    """Load and check the job with every combination of values of a grid.

    Args:
        job: job file.
        grids: texts ``field=value,value``.
        overrides: assignments for all runs.
        policy: restrictions on plugins.
        directory: directory of the sweep; by default ``<run.dir>/<run.name>-sweep``.
        checked: function that loads and checks the job of a combination; it gets a function that loads this job for a
            number of processes.

    Raises:
        JobError: a field or value is invalid, two values are equal, a field appears twice, there are too many
            combinations, or a combination cannot run.
        D9dError: the job file cannot be loaded, even without the grid.
    """
    axes = dict(_axis(grid) for grid in grids)
    if len(axes) < len(grids):
        raise JobError("--grid: a field appears twice; give all of its values at once: --grid FIELD=A,B,C")
    first = Job.load(job, overrides=overrides, policy=policy)
    parent = directory or first.run.dir / f"{first.run.name}-sweep"
    combinations = list(product(*axes.values()))
    if len(combinations) > _MOST:
        raise JobError(f"--grid: these are {len(combinations):,} runs; a sweep has at most {_MOST:,}")
    names = _names(list(axes), combinations)
    runs: list[SweepRun] = []
    problems: dict[str, None] = {}
    for name, values in zip(names, combinations, strict=True):
        chosen = [f"{field}={value}" for field, value in zip(axes, values, strict=True)]
        given = (*overrides, *chosen, f"run.dir={json.dumps(str(parent))}", f"run.name={json.dumps(name)}")
        try:
            loaded = checked(partial(_load, job, given, first.registry))
        except D9dError as error:
            lines = _of_grid(str(error), list(axes)).splitlines()
            # A line without "--grid" is due to the combination, as the job without the grid was loaded before.
            blame = f"--grid {' '.join(chosen)}: "
            problems |= dict.fromkeys(line if "--grid" in line else blame + line for line in lines)
            continue
        runs.append(SweepRun(name, given, loaded))
    if problems:
        more = [f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        raise JobError("\n".join([*list(problems)[:_SHOWN], *more]))
    _refuse_equal(runs)
    return runs


def _load(job: Path, overrides: Sequence[str], registry: Registry, world_size: int | None, _again: bool) -> Job:
    return Job.load(job, overrides=overrides, registry=registry, world_size=world_size)


def _axis(grid: str) -> tuple[str, list[str]]:
    field, equals, text = grid.partition("=")
    field = field.strip()
    values = list(_split(text))
    if not equals or not field or not all(values):
        raise JobError(f"--grid {grid}: write FIELD=VALUE,VALUE, for example --grid optimizer.lr=1e-4,3e-4")
    if re.split(r"[.\[]", field)[0] in _OWN:
        raise JobError(
            f"--grid {grid}: {field} cannot be in a grid: the sweep sets run, and plugins are equal in all runs"
        )
    return field, values


def _split(text: str) -> Iterator[str]:
    """Split a text at commas outside of brackets and quotes."""
    part, depth, quote = "", 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter in _OPEN + _CLOSE:
            depth += 1 if letter in _OPEN else -1
        elif letter == "," and depth == 0:
            yield part.strip()
            part = ""
            continue
        part += letter
    yield part.strip()


def _names(fields: Sequence[str], combinations: Sequence[Sequence[str]]) -> list[str]:
    """Names of runs, such as ``lr-3e-4_seed-1``: last parts of the fields, if they are unique, and the values."""
    last = [field.rpartition(".")[2] for field in fields]
    short = [end if last.count(end) == 1 else field for end, field in zip(last, fields, strict=True)]
    names = ["_".join(_plain(f"{f}-{v}") for f, v in zip(short, values, strict=True)) for values in combinations]
    twice = {name for name in names if names.count(name) > 1}
    return [f"{name}.{number}" if name in twice else name for number, name in enumerate(names)]


def _plain(text: str) -> str:
    return re.sub(r"[^\w.-]+", "-", text).strip("-.")


def _of_grid(text: str, fields: Sequence[str]) -> str:
    for field in fields:
        text = text.replace(f"--set {field}", f"--grid {field}")
    return text


def _refuse_equal(runs: Sequence[SweepRun]) -> None:
    seen: dict[str, SweepRun] = {}
    for run in runs:
        content = json.dumps(_compared(run.job.resolved()), sort_keys=True)
        if content in seen:
            raise JobError(
                f"--grid: {seen[content].name} and {run.name} are the same job; remove one of the equal values"
            )
        seen[content] = run


def _compared(job: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in job.items() if name not in _OWN}


def _lasting(job: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in _compared(job).items() if name not in _HOW}
