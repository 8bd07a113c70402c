"""Plan of a job, made without a GPU, a process group or memory for the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from d9d_core.components.contract import check_metric, check_optimizer
from d9d_core.components.instantiate import instantiate
from d9d_core.errors import BuildError, D9dError
from d9d_core.first_pass import TwoPassTask
from d9d_core.job_file.job import JobConfig
from d9d_core.job_file.resolve import Selection
from d9d_core.layout.check import idle_parts
from d9d_core.metric import StageMetric
from d9d_core.optimizer import AveragesWeights, LrSchedule, Optimizer
from d9d_core.plugin import ModelSpec
from d9d_core.registry.capabilities import Verdict
from d9d_core.registry.registry import Registry
from d9d_core.schedule import Program
from d9d_core.task import Task
from d9d_core.tensors import local
from torch import Tensor

from d9d_engine.compose.adapter import save_adapter
from d9d_engine.compose.assemble import Assembly, assemble
from d9d_engine.compose.communication.nodes import node_warning, processes_of_node
from d9d_engine.compose.communication.placements import Placed, placed_parameters
from d9d_engine.compose.communication.step import StepCollectives, step_collectives
from d9d_engine.compose.export import check_names
from d9d_engine.compose.first_pass.frozen import assemble_frozen, settle_first_pass
from d9d_engine.compose.initialise import Undrawn
from d9d_engine.compose.kernels import KernelChoice, bind_kernels, refuse_unused
from d9d_engine.compose.parts.series import check_series
from d9d_engine.compose.pretrained import pretrained_weights
from d9d_engine.compose.root import Root
from d9d_engine.costs.flops import tuning_flops
from d9d_engine.step.checked_task import CheckedTask
from d9d_engine.step.clip import GradientNorm
from d9d_engine.step.step import constant_lr

__all__ = ["MemoryEstimate", "Plan"]


@dataclass(frozen=True)
class MemoryEstimate:
    """Estimated memory of the planned rank (by default, of the first rank), in bytes and without activations.

    All attributes but ``host`` count memory of the device.

    Attributes:
        parameters: bytes of the model's parameters.
        gradients: bytes of the gradients of the trained parameters.
        optimizer: bytes of the optimizer state, and of tensors by which a strategy makes replicas equal.
        frozen: bytes of the separate frozen model of a first pass, such as a reference model.
        host: bytes of all such tensors that strategies keep in host memory.
    """

    parameters: int
    gradients: int
    optimizer: int
    frozen: int = 0
    host: int = 0

    @property
    def total(self) -> int:
        """Total of the estimated bytes on the device."""
        return self.parameters + self.gradients + self.optimizer + self.frozen


@dataclass(frozen=True)
class Plan:
    """Plan of a job: its records, assembled model, memory, kernels, collectives and warnings.

    Attributes:
        selection: plugin records of the job.
        verdicts: capabilities with their verdict: satisfied or undecided.
        assembly: model on the meta device.
        parameters: number of all parameters and of trained parameters.
        memory: estimated memory of this rank.
        flops_per_token: FLOPs of forward and backward per token; ``None`` if unknown.
        program: pipeline program of this rank's step.
        groups: parameter groups of the optimizer, as text and numbers for display.
        kernels: chosen backends for the ops of model and optimizer.
        placements: parameters of this rank, grouped by placement.
        collectives: collectives of this rank in a step.
        pretrained: text about the pretrained weights; ``None`` if the model is initialised at random.
        warnings: texts about settings that are slow or have no effect.
    """

    selection: Selection
    verdicts: Sequence[Verdict]
    assembly: Assembly
    parameters: tuple[int, int]
    memory: MemoryEstimate
    flops_per_token: float | None
    program: Program
    groups: dict[str, Any]
    kernels: Sequence[KernelChoice]
    placements: Sequence[Placed]
    collectives: StepCollectives
    pretrained: str | None = None
    warnings: Sequence[str] = ()


def plan(root: Root[JobConfig, Selection]) -> Plan:
    """Plan a job on the meta device and make all checks that need no memory for the model.

    Raises:
        D9dError: the job cannot run.
    """
    job, selection, registry, topology = root.job, root.selection, root.registry, root.topology
    if job.steps is not None:
        build_lr_schedule(job, selection, job.steps)
    task: Task = instantiate(selection.task, job.task)
    length = getattr(job.data, "sequence_length", None)
    task.check(job.model, {"sequence_length": length} if isinstance(length, int) else {})  # further facts need the data
    for chosen, config in [*selection.subscribers, *selection.trackers]:
        instantiate(chosen, config)
    metrics = [(chosen, instantiate(chosen, config)) for chosen, config in selection.metrics]
    assembly = assemble(root)
    check_series(job, selection, assembly, CheckedTask(selection.task, task), task)
    with pretrained_weights(job, selection, registry, assembly.full_model, assembly.injected, topology) as weights:
        pretrained = None if weights is None else weights.summary()
    for chosen, metric in metrics:
        if isinstance(metric, StageMetric):
            metric.attach(assembly.full_model)
        check_metric(chosen, metric)
    warnings = idle_parts(job, selection)
    if job.export and isinstance(spec := selection.model.spec, ModelSpec) and spec.hugging_face is not None:
        save_adapter(job, selection, assembly, topology, warnings.append, {})
    if job.export in (True, "best"):
        check_names(job, selection, assembly)
    trained = assembly.trained()
    optimizer, _, step_kernels = choose_optimizer(root, assembly)
    with Undrawn():
        optimizer.init_state()
    check_optimizer(selection.optimizer, optimizer)
    memory = estimate_memory(root, assembly, optimizer, task)
    collectives = step_collectives(job, selection, assembly, topology, task, optimizer)
    slow = node_warning(job.mesh.tp, processes_of_node(job.device), collectives)
    return Plan(
        selection=selection,
        verdicts=root.resolution.verdicts,
        assembly=assembly,
        parameters=(sum(p.numel() for p in assembly.full_model.parameters()), sum(p.numel() for p in trained.values())),
        memory=memory,
        flops_per_token=flops_per_token(job, selection, registry),
        program=assembly.pipeline.program(topology.coordinate["pp"], job.microbatches),
        groups=dict(optimizer.describe()),
        kernels=[*assembly.kernels, *step_kernels],
        placements=placed_parameters(assembly.model),
        collectives=collectives,
        pretrained=pretrained,
        warnings=[text.removeprefix("warning: ") for text in warnings] + ([] if slow is None else [slow]),
    )


def _gradient_dtype(job: JobConfig, parameter: Tensor) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, job.gradients.accumulate) if job.gradients.accumulate else parameter.dtype
    return dtype


def estimate_memory(
    root: Root[JobConfig, Selection], assembly: Assembly, optimizer: Optimizer, task: object
) -> MemoryEstimate:
    """Estimate the memory of this rank, without activations.

    Args:
        root: the job with its plugin records and the topology of this process.
        assembly: assembled model on the meta device.
        optimizer: optimizer with its state on the meta device.
        task: task of the job, which may need a frozen model.
    """
    here, trained = dict(assembly.model.named_parameters()), assembly.trained()
    device, host = _Bytes(), _Bytes()

    def place_of(name: str) -> _Bytes:
        return host if name in assembly.on_host else device

    for name, parameter in here.items():
        place_of(name).parameters += local(parameter).nbytes
        if name in trained:
            place_of(name).gradients += local(parameter).numel() * _gradient_dtype(root.job, parameter).itemsize
    for one in assembly.meetings:  # strategies that make diverged replicas equal
        one.start()
    states = [optimizer.state(), *(one.state() for one in assembly.meetings)]
    for key, tensor in ((key, tensor) for state in states for key, tensor in state.items()):
        name = key.rpartition("/")[0]
        if name in here:
            place_of(name).optimizer += local(tensor).nbytes
    frozen, frozen_host = _frozen_bytes(root, assembly, task)
    return MemoryEstimate(device.parameters, device.gradients, device.optimizer, frozen, host.total + frozen_host)


@dataclass
class _Bytes:
    """Bytes of tensors in one memory, while they are counted."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


def _frozen_bytes(root: Root[JobConfig, Selection], assembly: Assembly, task: object) -> tuple[int, int]:
    """Bytes of the first pass's frozen model on this rank, on the device and on the host; 0 if there is none."""
    if not isinstance(task, TwoPassTask):
        return 0, 0
    by = settle_first_pass(task.first_pass, assembly)
    if by not in ("copy", "other"):
        return 0, 0
    beside, frozen = assemble_frozen(root, task.first_pass, by)
    with pretrained_weights(
        beside.job, beside.selection, root.registry, frozen.full_model, frozen.injected, root.topology
    ):
        sizes = {name: local(parameter).nbytes for name, parameter in frozen.model.named_parameters()}
    host = sum(size for name, size in sizes.items() if name in frozen.on_host)
    return sum(sizes.values()) - host, host


def build_lr_schedule(job: JobConfig, selection: Selection, steps: int) -> LrSchedule:
    """Build the learning-rate schedule of a run of ``steps`` steps; constant by default."""
    if selection.lr_schedule is None or job.lr_schedule is None:
        return constant_lr
    schedule: LrSchedule = instantiate(selection.lr_schedule, job.lr_schedule, steps)
    return schedule


def choose_optimizer(
    root: Root[JobConfig, Selection], assembly: Assembly
) -> tuple[Optimizer, GradientNorm, list[KernelChoice]]:
    """Build the optimizer of the trained parameters, without state, and choose kernels for it and the gradient norm.

    Args:
        root: the job with its plugin records and the topology of this process.
        assembly: assembled model.

    Raises:
        BuildError: the job names a backend for an op that neither the model nor the optimizer calls, or the optimizer
            averages weights of replicas that take their own steps.
    """
    job = root.job
    optimizer: Optimizer = instantiate(root.selection.optimizer, job.optimizer, assembly.trained())
    if assembly.meetings and isinstance(optimizer, AveragesWeights):
        raise BuildError(
            f"optimizer {root.selection.optimizer.entry} averages weights for evaluation, and a checkpoint cannot "
            "keep such averages of replicas that take their own steps; use the optimizer without the average"
        )
    norm = GradientNorm(job.gradient_clipping.p)
    kernels = bind_kernels(
        [("optimizer", optimizer), ("gradient_clipping", norm)],
        root.registry,
        job.kernels,
        # GPU kernels cannot read gradients and optimizer states in host memory.
        "cpu" if assembly.on_host else root.topology.device.type,
        job.precision.parameters,
        root.resolution.judge.verdicts,
        job.deterministic,
    )
    refuse_unused(job.kernels, [*assembly.kernels, *kernels], assembly.ops_elsewhere)
    return optimizer, norm, kernels


def flops_per_token(job: JobConfig, selection: Selection, registry: Registry) -> float | None:
    """FLOPs of forward and backward per token; ``None`` if model, data or fine-tuning method do not provide them."""
    spec = selection.model.spec
    length = getattr(job.data, "sequence_length", None)
    if not isinstance(spec, ModelSpec) or spec.flops is None or length is None:
        return None
    whole = float(spec.flops.load()(job.model, length))
    if job.peft is None:
        return whole
    try:
        return whole + tuning_flops(job, job.peft, length, registry)
    except D9dError:
        return None
