"""Composition root: from a job to a trainer, each component with its collaborators."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from d9d_core import events as ev
from d9d_core.components.contract import check_metric
from d9d_core.components.instantiate import instantiate
from d9d_core.config.base import ModelConfig
from d9d_core.config.job import JobConfig
from d9d_core.config.resolve import Selection, resolve
from d9d_core.plugin.capabilities import Chosen
from d9d_core.plugin.manifest import Manifest
from d9d_core.plugin.records import ScheduleSpec
from d9d_core.plugin.registry import Registry
from d9d_core.program.actions import Action
from d9d_core.program.runner import Handler, StageRunner
from d9d_core.protocols.data import DataContext, DataStream
from d9d_core.protocols.metric import Metric
from d9d_core.protocols.subscriber import Subscriber
from d9d_core.protocols.task import Task
from d9d_core.tensors import local
from torch import Tensor, nn
from torch import distributed as dist

from d9d_engine.build.adapter import start_method
from d9d_engine.build.assemble import Assembly, assemble
from d9d_engine.build.export import exporter
from d9d_engine.build.initialise import initialise
from d9d_engine.build.plan import build_lr_schedule, build_optimizer, circumstances
from d9d_engine.build.pretrained import pretrained_weights
from d9d_engine.distributed.mesh import Topology
from d9d_engine.run.checkpointer import Checkpointer, open_store
from d9d_engine.run.evaluation import Evaluator
from d9d_engine.run.interrupt import Interrupts
from d9d_engine.run.prefetch import DevicePrefetcher
from d9d_engine.run.trainer import Trainer
from d9d_engine.step.auxiliary_losses import AuxiliaryLosses, Tallies
from d9d_engine.step.boundary import Boundaries
from d9d_engine.step.checked_task import CheckedTask
from d9d_engine.step.executor import Executor
from d9d_engine.step.gradients import Gradients
from d9d_engine.step.loss import LossScale
from d9d_engine.step.metrics import Statistics
from d9d_engine.step.ownership import DATA_AXES
from d9d_engine.step.randomness import derive_seed
from d9d_engine.step.step import TrainStep
from d9d_engine.step.tied import find_ties
from d9d_engine.step.totals import Clipper
from d9d_engine.trackers.hub import TrackerHub


def build(
    job: JobConfig,
    registry: Registry,
    topology: Topology,
    note: Callable[[str], None],
    observers: Sequence[Subscriber] = (),
    interrupts: Interrupts | None = None,
) -> Trainer:
    """Compose everything a run needs; nothing is looked up by name afterwards. Collective over all ranks.

    Args:
        job: validated.
        registry: what the job's names mean.
        topology: this process among others, and its device.
        note: prints a line about long work or a warning.
        observers: subscribers besides those of the job.
        interrupts: requests to stop, which may have come already; by default, signals during training.

    Raises:
        D9dError: the job cannot run; the text says why.
    """
    topology.watchdog.phase("startup")
    selection = resolve(job, registry, topology.world_size, circumstances(job, topology.device)).selection
    subscribers = [instantiate(chosen, config) for chosen, config in selection.subscribers]
    events = ev.Events([*subscribers, *observers])
    events.emit(ev.JobConfigured(job))
    # What needs no memory comes first, so that a mistake is reported before data is prepared.
    assembly = assemble(job, selection, registry, topology, circumstances(job, topology.device))
    lr_schedule = build_lr_schedule(job, selection)
    own_task: Task = instantiate(selection.task, job.task)
    task = CheckedTask(selection.task, own_task)
    store = open_store(job, topology, note)

    data_ranks = topology.axes_group(*DATA_AXES) if topology.world_size > 1 else None
    all_parts = topology.axes_group("pp", *DATA_AXES) if topology.world_size > 1 else None
    started = time.perf_counter()
    with topology.main_first(per_machine=True):  # one process prepares what the others find
        stream = _open_data(job, topology, selection.dataset, job.data, note)
    task.check(job.model, stream.facts)
    events.emit(ev.DataReady(stream))
    note(f"data: {_facts(stream)} ({time.perf_counter() - started:.1f} s)")

    beside_weights: Mapping[str, bytes] = {}
    kept_fields: Mapping[str, Any] = {}
    with pretrained_weights(job, selection, assembly.full_model, assembly.injected, topology) as pretrained:
        for stage in assembly.stages.values():
            materialise(stage, assembly.on_host, job.seed, topology.device)
        model = assembly.model
        if pretrained is not None:
            pretrained.load(model, job, topology, note)
            beside_weights, kept_fields = pretrained.others, pretrained.kept
    start_method(job, selection, assembly, topology, note)
    accumulate = getattr(torch, job.gradients.accumulate) if job.gradients.accumulate else None
    ties = find_ties(assembly.stages, assembly.shared, assembly.trainable, assembly.pipeline, topology, accumulate)
    ties.copy_values()
    events.emit(ev.ModelReady(model, assembly.stage_holders(topology)))
    here = dict(model.named_parameters())
    trained = {name: parameter for name, parameter in here.items() if name in assembly.trainable}
    share = f", {sum(local(p).numel() for p in here.values()):,} of them here" if topology.world_size > 1 else ""
    note(f"model: {_parameters(assembly)} on {topology.device}{share}")

    optimizer = build_optimizer(job, selection, assembly.trained())
    events.emit(ev.OptimizerReady(optimizer))

    statistics = _statistics(job, selection, assembly, topology, all_parts)
    gradients = Gradients(
        trained,
        assembly.ownership,
        topology,
        reducers=assembly.reducers,
        bucket_mib=job.gradients.bucket_mib,
        accumulate=accumulate,
        ties=ties,
    )
    auxiliary_losses = AuxiliaryLosses(assembly.stages, assembly.full_model, task)
    tallies = Tallies(assembly.stages, data_ranks)
    interrupts = interrupts or Interrupts()
    executor = Executor(
        stages=assembly.stages,
        pipeline=assembly.pipeline,
        boundaries=Boundaries(assembly.outlines, assembly.compute_dtype),
        topology=topology,
        task=task,
        auxiliary_losses=auxiliary_losses,
        tallies=tallies,
        gradients=gradients,
        statistics=statistics,
        draws=_draws(job, topology),
        autocast=getattr(torch, job.precision.autocast) if job.precision.autocast else None,
        unsplittable=assembly.unsplittable(),
        handlers=_schedule_handlers(job, selection),
    )
    step = TrainStep(
        task=task,
        loss_scale=LossScale(task, auxiliary_losses, data_ranks),
        executor=executor,
        gradients=gradients,
        clipper=Clipper(
            trained,
            {**task.coefficients, **auxiliary_losses.coefficients},
            topology,
            job.gradient_clipping.max_norm,
            job.gradient_clipping.p,
            # Ranks learn at different moments that a save or a subscriber failed; they stop after the same step.
            stop=lambda: interrupts.requested is not None or store.failed or events.failure is not None,
            views=assembly.ownership.views,
            elsewhere=ties.elsewhere,
        ),
        statistics=statistics,
        before_update=store.before_mutation,
        optimizer=optimizer,
        ties=ties,
        lr_schedule=lr_schedule,
        tallies=tallies,
        events=events,
    )
    tracked = selection.trackers if topology.is_main else ()
    trackers = TrackerHub({_unique(c, selection.trackers): instantiate(c, config) for c, config in tracked}, note)
    prefetcher = DevicePrefetcher(stream, topology.device, waiting_for=topology.watchdog.waiting_for)
    checkpointer = Checkpointer(
        store=store,
        stage=model,
        ties=ties,
        optimizer=optimizer,
        statistics=statistics,
        stream=prefetcher,
        trackers=trackers,
        job=job,
        manifest=Manifest.of(registry),
        note=note,
    )
    return Trainer(
        job=job,
        topology=topology,
        model=model,
        step=step,
        prefetcher=prefetcher,
        trackers=trackers,
        evaluator=_evaluator(job, selection, topology, task, executor, model, all_parts, note),
        checkpointer=checkpointer,
        export=exporter(job, selection, assembly, topology, stream, beside_weights, kept_fields, note),
        interrupts=interrupts,
        events=events,
        note=note,
    )


def _open_data(
    job: JobConfig, topology: Topology, chosen: Chosen, config: Any, note: Callable[[str], None]
) -> DataStream:
    context = DataContext(
        seed=job.seed,
        batch_size=job.batch.size,
        microbatch_size=job.microbatch_size,
        cache_dir=job.run.cache,
        rank=topology.data_parallel_rank,
        ranks=topology.data_parallel_size,
        note=note,
        pretrained=job.model.pretrained if isinstance(job.model, ModelConfig) else None,
    )
    stream: DataStream = instantiate(chosen, config, context)
    return stream


def _parameters(assembly: Assembly) -> str:
    groups = (dict(assembly.full_model.named_parameters()), assembly.trained())
    count, training = (sum(parameter.numel() for parameter in group.values()) for group in groups)
    return f"{count:,} parameters" + (f", {training:,} of them train" if training < count else "")


def _statistics(
    job: JobConfig, selection: Selection, assembly: Assembly, topology: Topology, group: dist.ProcessGroup | None
) -> Statistics:
    metrics: dict[str, Metric] = {}
    for chosen, config in selection.metrics:
        metrics[_unique(chosen, selection.metrics)] = instantiate(chosen, config)
    statistics = Statistics(metrics, gated=job.nonfinite == "skip", group=group, device=topology.device)
    statistics.attach(assembly.full_model)
    for (chosen, _), metric in zip(selection.metrics, metrics.values(), strict=True):
        check_metric(chosen, metric)
    return statistics


def materialise(stage: nn.Module, on_host: frozenset[str], seed: int, device: torch.device) -> None:
    """Give an assembled stage its memory and its initial values, the same in every layout.

    Args:
        stage: on the meta device.
        on_host: names of the parameters that live in the host's memory.
        seed: of the job.
        device: where everything else lives.
    """
    kept = {id(parameter) for name, parameter in stage.named_parameters() if name in on_host}

    def allocate(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device="cpu" if id(tensor) in kept else device)

    tied = _tied(stage)
    stage._apply(allocate)  # type: ignore[no-untyped-call]  # noqa: SLF001 - to_empty() has one device for all tensors
    for name, first in tied.items():
        owner, _, leaf = name.rpartition(".")
        if stage.get_parameter(name) is not stage.get_parameter(first):  # each got memory of its own
            setattr(stage.get_submodule(owner), leaf, stage.get_parameter(first))
    initialise(stage, seed, device)
    stage.train()


def _tied(stage: nn.Module) -> dict[str, str]:
    """Tied names: name of a parameter that has several -> the first of them."""
    first: dict[int, str] = {}
    names = stage.named_parameters(remove_duplicate=False)
    found = {name: first.setdefault(id(parameter), name) for name, parameter in names}
    return {name: original for name, original in found.items() if name != original}


def _draws(job: JobConfig, topology: Topology) -> Callable[[int, int, int], int]:
    """Seed the draws of a microbatch from the step, its first sample's position in the batch and the stage."""
    first = topology.data_parallel_rank * (job.batch.size // topology.data_parallel_size)

    def seed(step: int, index: int, stage: int) -> int:
        keys = ("step", step, "sample", first + index * job.microbatch_size)
        return derive_seed(job.seed, *keys, *(("stage", stage) if stage else ()))

    return seed


def _schedule_handlers(
    job: JobConfig, selection: Selection
) -> Callable[[StageRunner], Mapping[type[Action], Handler]] | None:
    spec = selection.schedule.spec if selection.schedule else None
    if not isinstance(spec, ScheduleSpec) or spec.handlers is None:
        return None
    return partial(spec.handlers.load(), job.pipeline)


def _evaluator(
    job: JobConfig,
    selection: Selection,
    topology: Topology,
    task: Task,
    executor: Executor,
    model: nn.Module,
    group: dist.ProcessGroup | None,
    note: Callable[[str], None],
) -> Evaluator | None:
    if job.evaluation is None or selection.evaluation is None:
        return None
    with topology.main_first(per_machine=True):
        stream = _open_data(job, topology, selection.evaluation, job.evaluation.data, note)
    task.check(job.model, stream.facts)
    prefetcher = DevicePrefetcher(stream, topology.device, waiting_for=topology.watchdog.waiting_for)
    return Evaluator(task, executor, model, prefetcher, job.evaluation.packs, group, topology.watchdog.beat)


def _unique(chosen: Chosen, parts: Any) -> str:
    names = [other.spec.name for other, _ in parts]
    return chosen.spec.name if names.count(chosen.spec.name) == 1 else f"{chosen.spec.name}[{chosen.where}]"


def _facts(stream: DataStream) -> str:
    def say(value: Any) -> str:
        return f"{value:,}" if isinstance(value, int) else f"{value:.4g}" if isinstance(value, float) else str(value)

    return ", ".join(f"{name.replace('_', ' ')} {say(value)}" for name, value in stream.facts.items())
