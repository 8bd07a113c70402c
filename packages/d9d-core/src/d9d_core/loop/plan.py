"""What a job would do, found out without a GPU, a process group or any memory for the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from d9d_core.config.job import JobConfig
from d9d_core.loop.assemble import Assembly, assemble
from d9d_core.loop.contract import check_metric, check_optimizer
from d9d_core.loop.parts import build_part
from d9d_core.loop.pretrained import pretrained_weights
from d9d_core.loop.program import Program
from d9d_core.loop.selection import Selection, check_capabilities, check_parts, check_world, select
from d9d_core.plugin.capabilities import Circumstances, Verdict
from d9d_core.plugin.records import ModelSpec
from d9d_core.plugin.registry import Registry
from d9d_core.protocols import LrSchedule, Optimizer, StageMetric, Task
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
    for chosen, config in [*selection.subscribers, *selection.trackers]:
        build_part(chosen, config)
    metrics = [(chosen, build_part(chosen, config)) for chosen, config in selection.metrics]
    assembly = assemble(job, selection, registry, topology, circumstances)
    with pretrained_weights(job, selection, assembly.whole, assembly.injected, topology) as weights:
        pretrained = None if weights is None else weights.summary()
    for chosen, metric in metrics:
        if isinstance(metric, StageMetric):
            metric.attach(assembly.whole)
        check_metric(chosen, metric)
    here = dict(assembly.model.named_parameters())
    trained = assembly.trained()
    optimizer = build_optimizer(job, selection, trained)
    memory = MemoryEstimate(
        parameters=sum(local(parameter).nbytes for parameter in here.values()),
        gradients=sum(local(parameter).nbytes for name, parameter in here.items() if name in trained),
        optimizer=sum(
            local(tensor).nbytes for key, tensor in optimizer.state().items() if key.rpartition("/")[0] in here
        ),
    )
    return Plan(
        selection=selection,
        verdicts=verdicts,
        assembly=assembly,
        parameters=(sum(p.numel() for p in assembly.whole.parameters()), sum(p.numel() for p in trained.values())),
        memory=memory,
        flops_per_token=_flops(job, selection),
        program=assembly.pipeline.program(topology.coordinate["pp"], job.microbatches),
        groups=dict(optimizer.describe()),
        pretrained=pretrained,
    )


def build_lr_schedule(job: JobConfig, selection: Selection) -> LrSchedule:
    """The learning-rate schedule of the job; a constant one by default."""
    if selection.lr_schedule is None or job.lr_schedule is None:
        return lambda _step: 1.0
    schedule: LrSchedule = build_part(selection.lr_schedule, job.lr_schedule, job.steps)
    return schedule


def build_optimizer(job: JobConfig, selection: Selection, trained: Mapping[str, nn.Parameter]) -> Optimizer:
    """The optimizer of the job over these parameters, with its state."""
    optimizer: Optimizer = build_part(selection.optimizer, job.optimizer, trained)
    optimizer.init_state()
    check_optimizer(selection.optimizer, optimizer)
    return optimizer


def _flops(job: JobConfig, selection: Selection) -> float | None:
    spec = selection.model.spec
    length = getattr(job.data, "sequence_length", None)
    if not isinstance(spec, ModelSpec) or spec.flops is None or length is None:
        return None
    return float(spec.flops.load()(job.model, length))
