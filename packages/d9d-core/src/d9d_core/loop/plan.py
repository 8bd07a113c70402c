"""What a job would do, found out without a GPU, a process group or any memory for the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from d9d_core.config.job import JobConfig
from d9d_core.errors import BuildError
from d9d_core.loop.assemble import Assembly, assemble, build_part
from d9d_core.loop.executor import checked_programs
from d9d_core.loop.pretrained import pretrained_weights
from d9d_core.loop.program import Backward, Forward, Program, Reduce, Schedule, count_stages, single_stage
from d9d_core.loop.selection import Selection, check_capabilities, check_parts, check_world, select
from d9d_core.plugin.capabilities import Circumstances, Verdict
from d9d_core.plugin.records import ModelSpec, ScheduleSpec
from d9d_core.plugin.registry import Registry
from d9d_core.protocols import LrSchedule, Optimizer, Task
from d9d_core.topology.local import local
from d9d_core.topology.mesh import Topology


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on the first rank, without activations."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.gradients + self.optimizer


@dataclass(frozen=True)
class Plan:
    """The outcome of planning.

    Attributes:
        selection: records behind the job's names.
        verdicts: capabilities, satisfied or undecided.
        assembly: the model on the meta device.
        parameters: number of parameters, and of those that train.
        memory: per device.
        flops_per_token: of forward and backward, if the model and data tell.
        program: what the first pipeline rank does in one step.
        groups: the optimizer's parameter groups in words.
        pretrained: which weights the model starts from, in words; ``None`` if they are drawn.
    """

    selection: Selection
    verdicts: Sequence[Verdict]
    assembly: Assembly
    parameters: tuple[int, int]
    memory: MemoryEstimate
    flops_per_token: float | None
    program: Program
    groups: dict[str, Any]
    pretrained: str | None = None


def plan(job: JobConfig, registry: Registry, topology: Topology, circumstances: Circumstances, world_size: int) -> Plan:
    """Check everything that can be checked before anything is allocated.

    Raises:
        D9dError: the job cannot run; the text says why.
    """
    check_world(job, world_size)
    selection = select(job, registry)
    check_parts(job, selection)
    verdicts = check_capabilities(selection, registry, circumstances)
    build_lr_schedule(job, selection)
    task: Task = build_part(selection.task, job.task)
    task.check(job.model, {})  # what can be said without data
    assembly = assemble(job, selection, registry, topology, circumstances)
    with pretrained_weights(job, selection, assembly.stage, assembly.injected, topology) as weights:
        pretrained = None if weights is None else weights.summary()
    parameters = dict(assembly.stage.named_parameters())
    trained = {name: parameter for name, parameter in parameters.items() if name in assembly.trainable}
    optimizer: Optimizer = build_part(selection.optimizer, job.optimizer, trained)
    optimizer.init_state()
    memory = MemoryEstimate(
        parameters=sum(local(parameter).nbytes for parameter in parameters.values()),
        gradients=sum(local(parameter).nbytes for parameter in trained.values()),
        optimizer=sum(local(tensor).nbytes for tensor in optimizer.state().values()),
    )
    return Plan(
        selection=selection,
        verdicts=verdicts,
        assembly=assembly,
        parameters=(sum(p.numel() for p in parameters.values()), sum(p.numel() for p in trained.values())),
        memory=memory,
        flops_per_token=_flops(job, selection),
        program=checked_programs(build_schedule(job, selection), job.mesh.pp, job.microbatches)[0],
        groups=dict(optimizer.describe()),
        pretrained=pretrained,
    )


def build_schedule(job: JobConfig, selection: Selection) -> Schedule:
    """The program generator of the job; the single-stage one by default.

    Raises:
        BuildError: the mesh has pipeline stages, but the job names no schedule, or the schedule runs several stages.
    """
    if selection.schedule is None or job.pipeline is None:
        if job.mesh.pp > 1:
            raise BuildError(f"mesh.pp is {job.mesh.pp}, but the job names no schedule; add 'pipeline: <name>'")
        return single_stage
    schedule: Schedule = build_part(selection.schedule, job.pipeline)
    programs = checked_programs(schedule, job.mesh.pp, job.microbatches)
    if (stages := count_stages(programs)) > 1:
        raise BuildError(
            f"pipeline: '{job.pipeline.name}' runs {stages} stages, and only models in one piece can be trained so "
            "far; remove 'pipeline' and set mesh.pp to 1. 'd9d pipeline show' draws the schedule"
        )
    spec = selection.schedule.spec
    kinds = {type(action) for program in programs for action in program}
    unknown = [kind.__name__ for kind in kinds - {Forward, Backward, Reduce}]
    if unknown and isinstance(spec, ScheduleSpec) and spec.handlers is None:
        raise BuildError(
            f"pipeline: '{job.pipeline.name}' asks for {', '.join(sorted(unknown))}, which nothing can run so far; "
            "choose another schedule, or remove 'pipeline'"
        )
    return schedule


def build_lr_schedule(job: JobConfig, selection: Selection) -> LrSchedule:
    """The learning-rate schedule of the job; a constant one by default."""
    if selection.lr_schedule is None or job.lr_schedule is None:
        return lambda _step: 1.0
    schedule: LrSchedule = build_part(selection.lr_schedule, job.lr_schedule, job.steps)
    return schedule


def _flops(job: JobConfig, selection: Selection) -> float | None:
    spec = selection.model.spec
    length = getattr(job.data, "sequence_length", None)
    if not isinstance(spec, ModelSpec) or spec.flops is None or length is None:
        return None
    return float(spec.flops.load()(job.model, length))
