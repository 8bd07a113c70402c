"""Build of a job's evaluator, with its datasets and their metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from d9d_core.data import DataStream
from d9d_core.errors import JobError
from d9d_core.job_file.job import JobConfig
from d9d_core.job_file.resolve import Part, Selection
from torch import distributed as dist

from d9d_engine.compose.assemble import Assembly
from d9d_engine.compose.first_pass.build import BuiltFirstPass
from d9d_engine.compose.parts.data import open_data, split_of
from d9d_engine.compose.parts.statistics import build_statistics
from d9d_engine.distributed.mesh import Topology
from d9d_engine.run.evaluation import EvaluationSet, Evaluator, likelihood_of
from d9d_engine.run.prefetch import DevicePrefetcher
from d9d_engine.run.real_samples import RealSamples
from d9d_engine.step.checked_task import CheckedTask
from d9d_engine.step.executor import Executor


@dataclass(frozen=True)
class Surroundings:
    """Shared inputs for building each evaluation set.

    Attributes:
        job: validated job.
        assembly: assembled model.
        topology: rank, device, meshes and process groups of this process.
        task: checked task of the job.
        group: process group over which values are merged; ``None`` for a single rank.
        note: prints a line.
    """

    job: JobConfig
    assembly: Assembly
    topology: Topology
    task: CheckedTask
    group: dist.ProcessGroup | None
    note: Callable[[str], None]


def build_evaluator(
    job: JobConfig,
    selection: Selection,
    assembly: Assembly,
    topology: Topology,
    task: CheckedTask,
    own_task: object,
    executor: Executor,
    group: dist.ProcessGroup | None,
    first: BuiltFirstPass,
    note: Callable[[str], None],
) -> Evaluator | None:
    """Build the evaluator of a job; ``None`` if the job has no evaluation. Collective over all ranks.

    Raises:
        D9dError: a dataset or a metric cannot be used.
    """
    if job.evaluation is None:
        return None
    around = Surroundings(job, assembly, topology, task, group, note)
    packs, names = job.evaluation.packs, job.evaluation.datasets
    sets = [
        build_set(around, name, part, None if packs == "all" else packs, selection.evaluation_metrics, first)
        for name, part in zip(names, selection.evaluation, strict=True)
    ]
    return Evaluator(task, executor, assembly.model, sets, group, topology.watchdog.beat, likelihood_of(own_task))


def build_set(
    around: Surroundings,
    name: str,
    part: Part,
    packs: int | None,
    metrics: Sequence[Part],
    first: BuiltFirstPass,
    limit: int | None = None,
) -> EvaluationSet:
    """Build an evaluation set with its data and metrics. Collective over all ranks.

    Args:
        around: shared inputs of all sets.
        name: name of the set; empty for a single set.
        part: plugin record and config of the dataset.
        packs: number of batches to evaluate; ``None`` evaluates every sample once.
        metrics: plugin records and configs of the metrics.
        first: first pass of the task.
        limit: largest number of samples in one pass.

    Raises:
        D9dError: the dataset or a metric cannot be used.
    """
    job, topology = around.job, around.topology
    chosen, config = part
    one_pass = packs is None
    with topology.main_first(per_machine=True):
        stream: DataStream = open_data(job, topology, chosen, config, around.note, one_pass)
    around.task.check(job.model, stream.facts)
    first_pass = first.over(stream, chosen.where)
    statistics = None
    if metrics or around.task.own_metrics():
        statistics = build_statistics(
            metrics, around.assembly, topology, around.group, False, "evaluation", around.task.own_metrics
        )
        if statistics.tallied:
            raise JobError(
                "evaluation.metrics: one of these metrics reads tallies that modules count in training only; "
                "move it to 'metrics'"
            )
    real = None
    if packs is None:
        stream = real = RealSamples(stream, chosen.where, limit)
        packs = -(-real.samples // job.batch.size)
    prefetcher = DevicePrefetcher(
        stream,
        topology.device,
        waiting_for=topology.watchdog.waiting_for,
        split=split_of(around.task, topology),
    )
    return EvaluationSet(prefetcher, packs, name, statistics, first_pass, real)
