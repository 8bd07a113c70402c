"""Composition of a job's executor, which runs the stages on microbatches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from d9d_core.job_file.job import BaseJob
from d9d_core.job_file.resolve import Parts
from d9d_core.plugin import ScheduleSpec
from d9d_core.program.runner import Handler, StageRunner
from d9d_core.schedule import Action
from d9d_core.task import StageInputs
from d9d_core.types import Microbatch
from torch import distributed as dist

from d9d_engine.compose.assemble import Assembly
from d9d_engine.distributed.mesh import Topology
from d9d_engine.profiling.ranges import Ranges
from d9d_engine.step.auxiliary_losses import AuxiliaryLosses, Tallies
from d9d_engine.step.boundary import Boundaries
from d9d_engine.step.checked_task import LossTask
from d9d_engine.step.executor import Executor
from d9d_engine.step.gradients import Gradients
from d9d_engine.step.metrics import Statistics
from d9d_engine.step.randomness import MicrobatchSeeds


def build_executor(
    job: BaseJob,
    selection: Parts,
    assembly: Assembly,
    topology: Topology,
    task: LossTask,
    auxiliary_losses: AuxiliaryLosses,
    tallies: Tallies,
    gradients: Gradients,
    statistics: Statistics,
    inputs: Callable[[Microbatch], StageInputs] | None = None,
    ranges: Ranges | None = None,
) -> Executor:
    """Build the executor of an assembled model's stages, with the handlers of the job's schedule.

    Args:
        job: job with the precision and batch sizes.
        selection: plugin records of the job.
        assembly: assembled stages, materialised.
        topology: rank, device, meshes and process groups of this process.
        task: makes model inputs from microbatches, and losses from outputs.
        auxiliary_losses: loss terms of the model's modules.
        tallies: counts of the model's modules.
        gradients: notified when a stage's gradients are complete.
        statistics: updated with the task's observations.
        inputs: makes the model's keyword arguments for a microbatch; by default the task does.
        ranges: profiler ranges around the actions.
    """
    return Executor(
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
        inputs=inputs,
        ranges=ranges,
    )


def build_frozen_executor(
    job: BaseJob,
    selection: Parts,
    assembly: Assembly,
    topology: Topology,
    task: LossTask,
    inputs: Callable[[Microbatch], StageInputs],
    group: dist.ProcessGroup | None,
) -> Executor:
    """Build the executor of a frozen model; see :func:`build_executor`.

    Args:
        job: job with the precision and batch sizes.
        selection: plugin records of the job.
        assembly: assembled stages, materialised.
        topology: rank, device, meshes and process groups of this process.
        task: task of the job.
        inputs: makes the model's keyword arguments for a microbatch.
        group: process group of all ranks that train together.
    """
    return build_executor(
        job,
        selection,
        assembly,
        topology,
        task,
        AuxiliaryLosses(assembly.stages, assembly.full_model, task),
        Tallies(assembly.stages),
        Gradients({}, assembly.ownership, topology, reducers=assembly.reducers),
        Statistics({}, gated=False, group=group, device=topology.device),
        inputs,
    )


def _draws(job: BaseJob, topology: Topology) -> MicrobatchSeeds:
    first = topology.data_parallel_rank * (job.batch.size // topology.data_parallel_size)
    return MicrobatchSeeds(job.seed, first, job.microbatch_size, topology.coordinate["cp"])


def _schedule_handlers(
    job: BaseJob, selection: Parts
) -> Callable[[StageRunner], Mapping[type[Action], Handler]] | None:
    spec = selection.schedule.spec if selection.schedule else None
    if not isinstance(spec, ScheduleSpec) or spec.handlers is None:
        return None
    return partial(spec.handlers.load(), job.pipeline)
