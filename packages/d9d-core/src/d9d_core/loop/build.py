"""The composition root: from a job to a trainer, each component with its collaborators."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from d9d_core.config.job import JobConfig
from d9d_core.loop import events as ev
from d9d_core.loop.assemble import Assembly, assemble, build_part
from d9d_core.loop.evaluation import Evaluator
from d9d_core.loop.executor import Executor
from d9d_core.loop.feed import Feed
from d9d_core.loop.gradients import Clipper, Gradients
from d9d_core.loop.keeper import Keeper
from d9d_core.loop.loss import LossScale
from d9d_core.loop.plan import build_lr_schedule, build_schedule
from d9d_core.loop.selection import Selection, check_capabilities, check_parts, check_world, select
from d9d_core.loop.statistics import Statistics
from d9d_core.loop.step import TrainStep
from d9d_core.loop.trainer import Trainer
from d9d_core.plugin.capabilities import Chosen, Circumstances
from d9d_core.plugin.manifest import Manifest
from d9d_core.plugin.records import ModelSpec, ScheduleSpec
from d9d_core.plugin.registry import Registry
from d9d_core.protocols import DataContext, DataStream, Metric, Optimizer, Task
from d9d_core.state.checkpoint import CheckpointStore
from d9d_core.state.export import export_model
from d9d_core.state.model import model_tensors
from d9d_core.state.random import initialise
from d9d_core.topology.mesh import Topology
from d9d_core.trackers.hub import TrackerHub


def build(job: JobConfig, registry: Registry, topology: Topology, note: Callable[[str], None]) -> Trainer:
    """Build everything a run needs. Nothing is looked up by name afterwards.

    Args:
        job: validated.
        registry: what the job's names mean.
        topology: this process and its device.
        note: prints a line about long work or a warning.

    Raises:
        D9dError: the job cannot run; the text says why.
    """
    check_world(job, topology.world_size)
    selection = select(job, registry)
    check_parts(job, selection)
    check_capabilities(selection, registry, circumstances(job, topology.device))
    events = ev.Events([build_part(chosen, config) for chosen, config in selection.subscribers])
    events.emit(ev.JobConfigured(job))
    # What needs no memory comes first, so that a mistake is reported before data is prepared.
    assembly = assemble(job, selection, registry, topology, circumstances(job, topology.device))
    lr_schedule = build_lr_schedule(job, selection)
    task: Task = build_part(selection.task, job.task)
    store = CheckpointStore(job.run.directory / "checkpoints", job.checkpoint.keep)
    store.prepare()

    started = time.perf_counter()
    stream = _open_data(job, topology, selection.dataset, job.data, note)
    task.check(job.model, stream.facts)
    events.emit(ev.DataReady(stream))
    note(f"data: {_facts(stream)} ({time.perf_counter() - started:.1f} s)")

    stage = _materialise(assembly, job.seed, topology.device)
    events.emit(ev.ModelReady(stage))
    trained = {name: p for name, p in stage.named_parameters() if name in assembly.trainable}
    note(f"model: {sum(p.numel() for p in stage.parameters()):,} parameters on {topology.device}")

    optimizer: Optimizer = build_part(selection.optimizer, job.optimizer, trained)
    optimizer.init_state()
    events.emit(ev.OptimizerReady(optimizer))

    metrics: dict[str, Metric] = {
        _unique(c, selection.metrics): build_part(c, config) for c, config in selection.metrics
    }
    statistics = Statistics(metrics, gated=job.nonfinite == "skip")
    gradients = Gradients(trained.values())
    executor = Executor(
        stage=stage,
        task=task,
        gradients=gradients,
        statistics=statistics,
        schedule=build_schedule(job, selection),
        device=topology.device,
        autocast=getattr(torch, job.precision.autocast) if job.precision.autocast else None,
        handlers=_schedule_handlers(job, selection),
    )
    step = TrainStep(
        seed=job.seed,
        loss_scale=LossScale(task),
        executor=executor,
        gradients=gradients,
        clipper=Clipper(trained.values(), job.gradient_clipping.max_norm, job.gradient_clipping.p),
        statistics=statistics,
        optimizer=optimizer,
        lr_schedule=lr_schedule,
        events=events,
    )
    trackers = TrackerHub(
        {_unique(c, selection.trackers): build_part(c, config) for c, config in selection.trackers}, note
    )
    keeper = Keeper(
        store=store,
        stage=stage,
        optimizer=optimizer,
        statistics=statistics,
        stream=stream,
        trackers=trackers,
        job=job,
        manifest=Manifest.of(registry),
        note=note,
    )
    return Trainer(
        job=job,
        device=topology.device,
        step=step,
        task=task,
        feed=Feed(stream, topology.device),
        trackers=trackers,
        evaluator=_evaluator(job, selection, topology, task, executor, note),
        keeper=keeper,
        export=_exporter(job, selection, assembly, stage, stream),
        events=events,
        note=note,
    )


def circumstances(job: JobConfig, device: torch.device | None) -> Circumstances:
    """What capabilities are judged against; ``device`` is ``None`` where the job will run elsewhere."""
    capability = None
    if device is not None and device.type == "cuda" and torch.cuda.is_available():
        capability = torch.cuda.get_device_capability(device)
    return Circumstances(job.mesh.sizes(), device.type if device else None, capability)


def _open_data(
    job: JobConfig, topology: Topology, chosen: Chosen, config: Any, note: Callable[[str], None]
) -> DataStream:
    context = DataContext(
        seed=job.seed,
        batch_size=job.batch.size,
        microbatch_size=job.microbatch_size,
        cache_dir=job.run.cache,
        rank=0,
        ranks=topology.data_parallel_size,
        note=note,
    )
    stream: DataStream = build_part(chosen, config, context)
    return stream


def _materialise(assembly: Assembly, seed: int, device: torch.device) -> nn.Module:
    stage = assembly.stage.to_empty(device=device)
    initialise(stage, seed, device)
    return stage.train()


def _schedule_handlers(job: JobConfig, selection: Selection) -> Mapping[Any, Any]:
    spec = selection.schedule.spec if selection.schedule else None
    if not isinstance(spec, ScheduleSpec) or spec.handlers is None:
        return {}
    handlers: Mapping[Any, Any] = spec.handlers.load()(job.pipeline)
    return handlers


def _evaluator(
    job: JobConfig,
    selection: Selection,
    topology: Topology,
    task: Task,
    executor: Executor,
    note: Callable[[str], None],
) -> Evaluator | None:
    if job.evaluation is None or selection.evaluation is None:
        return None
    stream = _open_data(job, topology, selection.evaluation, job.evaluation.data, note)
    task.check(job.model, stream.facts)
    return Evaluator(task, executor, Feed(stream, topology.device), job.evaluation.packs)


def _exporter(
    job: JobConfig, selection: Selection, assembly: Assembly, stage: nn.Module, stream: DataStream
) -> Callable[[], None] | None:
    spec = selection.model.spec
    if not job.export or not isinstance(spec, ModelSpec):
        return None
    assert spec.hugging_face is not None  # check_parts made sure
    layout = spec.hugging_face.load()()

    def export() -> None:
        if assembly.peft is not None:
            assembly.peft.merge(stage)
        tensors = layout.export_state(job.model, model_tensors(stage))
        config = layout.config_json(job.model, job.precision.parameters)
        export_model(job.run.directory / "model", tensors, config, stream.save_assets)

    return export


def _unique(chosen: Chosen, parts: Any) -> str:
    names = [other.spec.name for other, _ in parts]
    return chosen.spec.name if names.count(chosen.spec.name) == 1 else f"{chosen.spec.name}[{chosen.where}]"


def _facts(stream: DataStream) -> str:
    def say(value: Any) -> str:
        return f"{value:,}" if isinstance(value, int) else f"{value:.4g}" if isinstance(value, float) else str(value)

    return ", ".join(f"{name.replace('_', ' ')} {say(value)}" for name, value in stream.facts.items())
