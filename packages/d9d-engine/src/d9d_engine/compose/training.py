"""Composition of a trainer from a job: builds the components in order and connects them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from d9d_core import events as ev
from d9d_core.components.contract import check_optimizer
from d9d_core.components.instantiate import instantiate
from d9d_core.job_file.job import JobConfig
from d9d_core.job_file.resolve import Selection
from d9d_core.layout.check import idle_parts
from d9d_core.optimizer import Optimizer
from d9d_core.registry.manifest import Manifest
from d9d_core.subscriber import EndsTraining, StatefulSubscriber, Subscriber
from d9d_core.task import Task
from d9d_core.tensors import local_numel
from d9d_core.tracker import LogsValues
from torch import Tensor, nn

from d9d_engine.compose.assemble import Assembly, assemble
from d9d_engine.compose.executor import build_executor
from d9d_engine.compose.export import Exporter
from d9d_engine.compose.facts import parameter_counts, start_facts
from d9d_engine.compose.first_pass.build import build_first_pass
from d9d_engine.compose.parts.cuda_graphs import step_mark
from d9d_engine.compose.parts.data import count_steps, documents_of, split_of, summary_of
from d9d_engine.compose.parts.elastic import build_shared_step
from d9d_engine.compose.parts.evaluator import build_evaluator
from d9d_engine.compose.parts.series import check_series
from d9d_engine.compose.parts.statistics import build_statistics, unique_name
from d9d_engine.compose.plan import build_lr_schedule, choose_optimizer, flops_per_token
from d9d_engine.compose.root import Root, build_task
from d9d_engine.compose.weights import start_model
from d9d_engine.distributed.mesh import Topology
from d9d_engine.profiling.profiler import StepProfiler
from d9d_engine.profiling.ranges import Ranges
from d9d_engine.run.checkpointer import Checkpointer, open_store
from d9d_engine.run.forward import ModelForward, inputs_by_name
from d9d_engine.run.interrupt import Interrupts
from d9d_engine.run.open_run import Collaborators
from d9d_engine.run.prefetch import DevicePrefetcher
from d9d_engine.run.trainer import Trainer
from d9d_engine.sleep.sleeper import Sleeper
from d9d_engine.step.auxiliary_losses import AuxiliaryLosses, Tallies
from d9d_engine.step.checked_task import CheckedTask
from d9d_engine.step.clip import Clipper, division_of
from d9d_engine.step.gradients import Gradients
from d9d_engine.step.loss import LossScale
from d9d_engine.step.ownership import DATA_AXES
from d9d_engine.step.replicas import Replicas
from d9d_engine.step.step import TrainStep
from d9d_engine.subscribers.event_bus import Events
from d9d_engine.trackers.hub import TrackerHub
from d9d_engine.trackers.run_log import HubLog
from d9d_engine.trackers.utilisation import Utilisation


def build(
    root: Root[JobConfig, Selection],
    observers: Sequence[Subscriber] = (),
    interrupts: Interrupts | None = None,
    owning: bool = False,
) -> Trainer:
    """Build the trainer of a job with all its components. Collective over all ranks.

    Args:
        root: the job with its plugin records and the topology of this process.
        observers: subscribers in addition to the subscribers in the job.
        interrupts: stop requests, which may already have arrived; by default, signals received during training.
        owning: take ownership of the run's directory before data or weights are read, not only during training.

    Raises:
        D9dError: the job cannot run.
    """
    job, selection, registry, topology, note = root.job, root.selection, root.registry, root.topology, root.note
    own_task = build_task(job, selection, topology)
    task = CheckedTask(selection.task, own_task)
    subscribers = _subscribers(selection, observers, own_task)
    events = Events(subscribers.values())
    events.emit(ev.JobConfigured(job))
    # Steps that need no memory come first, so that errors are reported before the data is prepared.
    split = split_of(task, topology)
    assembly = _assembled(root)
    check_series(job, selection, assembly, task, own_task)
    lr_schedule = None if job.steps is None else build_lr_schedule(job, selection, job.steps)
    events.emit(ev.ModelPlanned(job))
    store = open_store(job, topology, note, owning=owning)

    data_ranks, all_parts = (
        topology.axes_group(*axes) if topology.world_size > 1 else None for axes in (DATA_AXES, ("pp", *DATA_AXES))
    )
    stream, _ = root.open_data()
    task.check(job.model, stream.facts)
    events.emit(ev.DataReady(stream))
    note(f"data: {summary_of(job, stream.facts)}")
    total_steps = count_steps(job, selection.dataset, stream.facts, note)
    lr_schedule = lr_schedule or build_lr_schedule(job, selection, total_steps)

    accumulate = getattr(torch, job.gradients.accumulate) if job.gradients.accumulate else None
    published, ties = start_model(root, assembly, accumulate)
    model = assembly.model
    events.emit(ev.ModelReady(model, assembly.stage_holders(topology)))
    trained = {name: parameter for name, parameter in model.named_parameters() if name in assembly.trainable}
    note(f"model: {_parameters(assembly, topology)}")

    optimizer, norm, kernels = choose_optimizer(root, assembly)
    optimizer.init_state()
    check_optimizer(selection.optimizer, optimizer)
    events.emit(ev.OptimizerReady(optimizer))
    replicas = Replicas(trained, assembly.ownership, topology, assembly.meetings)
    replicas.start()

    statistics = build_statistics(
        selection.metrics, assembly, topology, all_parts, job.nonfinite == "skip", "training", task.own_metrics
    )
    gradients = Gradients(
        trained,
        assembly.ownership,
        topology,
        reducers=assembly.reducers,
        bucket_mib=job.gradients.bucket_mib,
        accumulate=accumulate,
        ties=ties,
    )
    auxiliary_losses = AuxiliaryLosses(assembly.stages, assembly.full_model, task, topology.sizes["cp"])
    tallies = Tallies(assembly.stages, data_ranks)
    interrupts = interrupts or Interrupts()
    running = (auxiliary_losses, tallies, gradients, statistics)
    ranges = Ranges()
    executor = build_executor(job, selection, assembly, topology, task, *running, ranges=ranges)
    by_name = partial(build_executor, job, selection, assembly, topology, task, *running, inputs_by_name)
    events.emit(
        ev.ForwardReady(
            ModelForward(by_name, model, assembly.pipeline, job.microbatches, topology, documents_of(job)), topology
        )
    )
    first = build_first_pass(root, assembly, task, own_task, running)
    step = TrainStep(
        task=task,
        first_pass=first.over(stream, "data"),
        loss_scale=LossScale(task, auxiliary_losses, data_ranks, all_parts, (replicas.index, replicas.count)),
        executor=executor,
        gradients=gradients,
        clipper=Clipper(
            trained,
            {**task.coefficients, **auxiliary_losses.coefficients},
            topology,
            job.gradient_clipping.max_norm,
            norm,
            # Ranks learn at different times of a failed save or subscriber, but must stop after the same step.
            stop=lambda: interrupts.requested is not None or store.failed or events.failure is not None,
            views=assembly.ownership.views,
            elsewhere=ties.elsewhere,
            divide=division_of(optimizer, events),
            apart=assembly.ownership.apart,
        ),
        statistics=statistics,
        before_update=store.before_mutation,
        optimizer=optimizer,
        ties=ties,
        lr_schedule=lr_schedule,
        tallies=tallies,
        events=events,
        ranges=ranges,
        mark=step_mark(assembly.applied),
        replicas=replicas,
        shared=build_shared_step(assembly, task, *running),
    )
    evaluator = build_evaluator(job, selection, assembly, topology, task, own_task, executor, all_parts, first, note)
    tracked = selection.trackers if topology.is_main else ()
    trackers = TrackerHub({unique_name(c, selection.trackers): instantiate(c, config) for c, config in tracked}, note)
    prefetcher = DevicePrefetcher(
        stream, topology.device, job.batch.prefetch, waiting_for=topology.watchdog.waiting_for, split=split
    )
    checkpointer = Checkpointer(
        store=store,
        stage=model,
        ties=ties,
        optimizer=optimizer,
        statistics=statistics,
        stream=prefetcher,
        trackers=trackers,
        stateful=_with_state({**subscribers, "task": own_task}),
        job=job,
        manifest=Manifest.of(registry),
        note=note,
        programs=assembly.pipeline.programs(job.microbatches),
        save_assets=stream.save_assets,
        facts=start_facts(selection, assembly, [*assembly.kernels, *kernels], topology.device, stream),
        resynchronise=[one.resynchronise for _, one in assembly.applied if one.resynchronise is not None],
        replicas=replicas,
    )
    return Trainer(
        Collaborators(
            job=job,
            topology=topology,
            stage=model,
            step=step,
            total_steps=total_steps,
            prefetcher=prefetcher,
            trackers=trackers,
            log=_log(trackers, own_task, topology, job.logging.max_pending),
            evaluator=evaluator,
            checkpointer=checkpointer,
            export=Exporter(job, selection, assembly, topology, stream, published, Manifest.of(registry), note),
            interrupts=interrupts,
            events=events,
            sleeper=Sleeper(
                {
                    "weights": partial(_weights, [model] if first.model is None else [model, first.model]),
                    "optimizer": partial(_of_optimizer, optimizer, trained, replicas),
                },
                topology.device,
            ),
            ends={name: one for name, one in subscribers.items() if isinstance(one, EndsTraining)},
            note=note,
            profiler=StepProfiler(job.profiling, topology, job.run.directory / "profile", note, ranges),
            utilisation=Utilisation(
                topology.device,
                topology.world_size,
                flops_per_token(job, selection, registry),
                job.logging.peak_tflops,
                job.logging.memory,
            ),
        )
    )


def _assembled(root: Root[JobConfig, Selection]) -> Assembly:
    """Assemble the model on the meta device; check that model or optimizer call each op in the job's ``kernels``."""
    for text in idle_parts(root.job, root.selection):
        root.note(f"warning: {text}")
    assembly = assemble(root)
    choose_optimizer(root, assembly)
    return assembly


def _subscribers(selection: Selection, observers: Sequence[object], task: Task) -> dict[str, object]:
    """Subscribers by name, in call order: the job's, then observers, then the task if it is a subscriber."""
    found = {unique_name(c, selection.subscribers): instantiate(c, config) for c, config in selection.subscribers}
    found |= {f"observers[{index}]": observer for index, observer in enumerate(observers)}
    return {**found, "task": task} if isinstance(task, Subscriber) else found


def _log(trackers: TrackerHub, task: Task, topology: Topology, pending: int) -> HubLog:
    log = HubLog(trackers, lambda: 0, lag=0 if topology.device.type == "cpu" else pending)
    if isinstance(task, LogsValues):
        task.take_log(log)
    return log


def _with_state(parts: Mapping[str, object]) -> dict[str, StatefulSubscriber]:
    return {name: one for name, one in parts.items() if isinstance(one, StatefulSubscriber)}


def _weights(models: Sequence[nn.Module]) -> Iterator[Tensor]:
    for model in models:
        yield from model.parameters()
        yield from model.buffers()


def _of_optimizer(optimizer: Optimizer, trained: Mapping[str, nn.Parameter], replicas: Replicas) -> Iterator[Tensor]:
    yield from optimizer.state().values()
    yield from replicas.state().values()
    yield from (parameter.grad for parameter in trained.values() if parameter.grad is not None)


def _parameters(assembly: Assembly, topology: Topology) -> str:
    count, training = parameter_counts(assembly)
    here = local_numel(assembly.model.parameters())
    share = f", {here:,} of them here" if topology.world_size > 1 else ""
    return (
        f"{count:,} parameters"
        + (f", {training:,} of them train" if training < count else "")
        + f" on {topology.device}{share}"
    )
