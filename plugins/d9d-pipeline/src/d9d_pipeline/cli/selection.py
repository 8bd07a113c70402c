"""Selection of a command's schedule, by its name or by a job file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from d9d_core.config import PluginConfig
from d9d_core.containment import FOREIGN_FAILURES
from d9d_core.errors import JobError, PluginError
from d9d_core.job import JobFile
from d9d_core.job_file.lookup import load_config
from d9d_core.plugin import ScheduleSpec
from d9d_core.registry.entries import Entry, plugin_error
from d9d_core.registry.policy import PluginPolicy
from d9d_core.registry.registry import Registry
from d9d_core.schedule import Program, Schedule
from pydantic import ValidationError

_JOB_SUFFIXES = (".yaml", ".yml", ".toml", ".json")


@dataclass(frozen=True)
class SelectedSchedule:
    """Selected schedule, with the numbers of ranks and microbatches of a step.

    Attributes:
        name: name of the schedule's record.
        schedule: function that generates the programs.
        ranks: number of pipeline ranks.
        microbatches: number of microbatches of one step.
    """

    name: str
    schedule: Schedule
    ranks: int = 8
    microbatches: int = 32

    def at(self, ranks: int | None, microbatches: int | None) -> SelectedSchedule:
        """Copy with other numbers of ranks and microbatches; ``None`` keeps a number."""
        return replace(self, ranks=ranks or self.ranks, microbatches=microbatches or self.microbatches)

    def programs(self) -> Sequence[Program]:
        """Generate the program of each rank.

        Raises:
            JobError: the schedule does not support these numbers.
        """
        try:
            return self.schedule(self.ranks, self.microbatches)
        except ValueError as error:
            raise JobError(str(error)) from error


def is_job(target: str) -> bool:
    """Whether ``target`` names a job file rather than a schedule."""
    return target.endswith(_JOB_SUFFIXES) or Path(target).is_file()


def by_name(registry: Registry, name: str, overrides: Sequence[str]) -> SelectedSchedule:
    """Select a schedule of an installed plugin.

    Raises:
        PluginError: no schedule has this name, or several have it; or the schedule does not load.
        JobError: a field does not exist, or its value is invalid.
    """
    entry = registry.find("schedule", name)
    fields = dict(_field(override) for override in overrides)
    try:
        config = load_config(entry).model_validate({"name": entry.spec.key, **fields})
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, line['loc']))}: {line['msg']}" for line in error.errors(include_url=False)]
        raise JobError(f"schedule {entry.spec.key}: {'; '.join(lines)}; give fields with --set") from error
    return SelectedSchedule(entry.spec.key, _build(entry, config))


def from_job(path: str, overrides: Sequence[str], files: Sequence[Path]) -> SelectedSchedule:
    """Select the schedule of a job file, with the numbers of ranks and microbatches of its mesh and batch.

    Raises:
        JobError: the file is invalid, or names no schedule.
        PluginError: the schedule does not load.
    """
    job = JobFile.load(path, overrides=overrides, policy=PluginPolicy(files=tuple(files)))
    if job.pipeline is None:
        raise JobError(f"{path} names no schedule; add 'pipeline: 1f1b', or show a schedule by its name")
    entry = job.registry.find("schedule", job.pipeline.selector)
    return SelectedSchedule(entry.spec.key, _build(entry, job.pipeline), job.mesh.pp, job.microbatches)


def _field(override: str) -> tuple[str, str]:
    field, equals, value = override.partition("=")
    if not equals:
        raise JobError(f"--set {override}: write FIELD=VALUE, such as stages_per_rank=4")
    return field.strip().removeprefix("pipeline."), value.strip()


def _build(entry: Entry, config: PluginConfig) -> Schedule:
    spec = entry.spec
    if not isinstance(spec, ScheduleSpec):
        raise PluginError(f"schedule {entry} is declared with a {type(spec).__name__}; it takes a ScheduleSpec")
    try:
        schedule: Schedule = spec.build.load()(config)
    except FOREIGN_FAILURES as error:
        raise plugin_error(f"schedule {entry}: {spec.build} failed: {error!r}", error) from error
    return schedule
