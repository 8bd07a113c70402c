"""Placement of pipeline stages on ranks, and the ranks' programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from d9d_core.components.instantiate import instantiate
from d9d_core.config import PluginConfig, ScheduleConfig
from d9d_core.errors import BuildError, JobError
from d9d_core.job_file.job import BaseJob
from d9d_core.job_file.resolve import Parts
from d9d_core.model import Stage
from d9d_core.plugin import ScheduleSpec
from d9d_core.program.validation import placement, validate
from d9d_core.registry.capabilities import Chosen
from d9d_core.schedule import (
    Action,
    Backward,
    Forward,
    Program,
    Reduce,
    Schedule,
    compute_parts,
    count_stages,
    forward_only,
    single_stage,
)


@dataclass(frozen=True)
class Pipeline:
    """Placement of a model's stages on pipeline ranks, and the ranks' programs, which list their actions in a step.

    Attributes:
        schedule: function that generates the programs.
        hosts: position along ``pp`` of the rank that holds each stage.
        ranks: size of ``pp``.
        layers: number of layers of each stage; ``None`` if the model decides.
        kinds: types of the actions in a step of the job.
    """

    schedule: Schedule = single_stage
    hosts: tuple[int, ...] = (0,)
    ranks: int = 1
    layers: tuple[int, ...] | None = None
    kinds: frozenset[type[Action]] = frozenset({Forward, Backward, Reduce})
    _programs: dict[int, Sequence[Program]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """All stages, in the order of the forward."""
        return tuple(Stage(index, len(self.hosts), self.layers) for index in range(len(self.hosts)))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Stages of one rank along ``pp``, in ascending order."""
        return tuple(stage for stage, host in enumerate(self.hosts) if host == rank)

    def program(self, rank: int, microbatches: int) -> Program:
        """Program of one rank along ``pp`` for training with this number of microbatches.

        Raises:
            BuildError: the schedule does not support the number of microbatches, or places stages differently for it.
        """
        if microbatches not in self._programs:
            programs = checked_programs(self.schedule, self.ranks, microbatches)
            if _hosts(programs) != self.hosts:
                raise BuildError(
                    f"pipeline: with {microbatches} microbatch(es), the schedule puts stages on other ranks than with "
                    "the job's number of microbatches; choose another schedule"
                )
            self._programs[microbatches] = programs
        return self._programs[microbatches][rank]

    def programs(self, microbatches: int) -> Sequence[Program]:
        """Programs of all ranks along ``pp``; empty if there is one rank."""
        return [self.program(rank, microbatches) for rank in range(self.ranks)] if self.ranks > 1 else []

    def forward_program(self, rank: int, microbatches: int) -> Program:
        """Program of one rank along ``pp`` for evaluation: forwards only."""
        return forward_only(self.program(rank, microbatches))

    def least_microbatches(self, most: int) -> int:
        """Smallest number of microbatches that the schedule supports; it must support ``most``."""
        for count in range(1, most):
            try:
                self.program(0, count)
            except BuildError:
                continue
            return count
        return most


def plan_pipeline(job: BaseJob, selection: Parts) -> Pipeline:
    """Place a job's pipeline stages on ranks and generate their programs; without a schedule, there is one stage.

    Raises:
        BuildError: the mesh has pipeline ranks but the job names no schedule; the schedule's programs are invalid, or
            have actions without a handler.
        JobError: the schedule has several stages, but the model lacks the trait ``model:pipeline``.
    """
    if selection.schedule is None or job.pipeline is None:
        if job.mesh.pp > 1:
            raise BuildError(f"mesh.pp is {job.mesh.pp}, but the job names no schedule; add 'pipeline: <name>'")
        return Pipeline()
    pipeline = scheduled(selection.schedule, job.pipeline, job.mesh.pp, job.microbatches)
    model = selection.model
    if len(pipeline.hosts) > 1 and "model:pipeline" not in model.spec.provides:
        raise JobError(
            f"pipeline: '{job.pipeline.name}' cuts the model into {len(pipeline.hosts)} stages, but model "
            f"{model.entry} lacks the trait 'model:pipeline'; remove 'pipeline' and set mesh.pp to 1, "
            "or choose another model"
        )
    return pipeline


def scheduled(chosen: Chosen, config: PluginConfig, ranks: int, microbatches: int) -> Pipeline:
    """Place the stages of a schedule on ranks and generate the ranks' programs.

    Args:
        chosen: plugin record of the schedule.
        config: config of the schedule.
        ranks: size of ``pp``.
        microbatches: number of microbatches in a step.

    Raises:
        BuildError: the programs are invalid, or have actions without a handler.
    """
    schedule: Schedule = instantiate(chosen, config)
    programs = checked_programs(schedule, ranks, microbatches)
    assert isinstance(chosen.spec, ScheduleSpec)
    kinds = frozenset(
        type(part) for program in programs for action in program for part in (action, *compute_parts(action))
    )
    if chosen.spec.handlers is None:
        _check_handled(config.name, kinds)
    layers = config.layers if isinstance(config, ScheduleConfig) else None
    return Pipeline(schedule, _hosts(programs), ranks, layers, kinds, {microbatches: programs})


def checked_programs(schedule: Schedule, ranks: int, microbatches: int) -> Sequence[Program]:
    """Programs of all pipeline ranks, validated.

    Raises:
        BuildError: the schedule does not support these numbers of ranks and microbatches, or a program is invalid.
    """
    try:
        programs = schedule(ranks, microbatches)
    except ValueError as error:
        raise BuildError(f"pipeline: {error}") from error
    problems = validate(programs, count_stages(programs), microbatches)
    if len(programs) != ranks:
        problems = [f"{len(programs)} programs for {ranks} rank(s); a schedule must make one per rank"]
    if problems:
        more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
        text = f"pipeline: invalid program for {microbatches} microbatch(es): {'; '.join(problems[:5])}{more}"
        raise BuildError(f"{text}. This is an error of the schedule: choose another one, or repair its plugin")
    return programs


def _hosts(programs: Sequence[Program]) -> tuple[int, ...]:
    hosts = {stage: rank for rank, stages in enumerate(placement(programs)) for stage in stages}
    return tuple(hosts[stage] for stage in range(len(hosts)))


def _check_handled(name: str, kinds: frozenset[type[Action]]) -> None:
    if unknown := [kind.__name__ for kind in kinds - Pipeline().kinds]:
        raise BuildError(
            f"pipeline: '{name}' has actions without a handler: {', '.join(sorted(unknown))}; declare 'handlers' in "
            "its plugin, for example d9d-pipeline's: Ref('d9d_pipeline.runtime.handlers:handlers')"
        )
