"""Data of a job: what its datasets say beforehand, and a dataset that is opened for this rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from d9d_core.components.instantiate import instantiate
from d9d_core.config import ModelConfig
from d9d_core.data import DataContext, DataStream, TextInputs, packs_documents
from d9d_core.job_file.job import BaseJob, JobConfig
from d9d_core.registry.capabilities import Chosen
from d9d_core.types import Microbatch

from d9d_engine.distributed.mesh import Topology
from d9d_engine.distributed.positions import ZigzagPositions
from d9d_engine.step.checked_task import CheckedTask


def documents_of(job: BaseJob) -> bool | None:
    """Whether samples of the job hold several documents, those of evaluations included; ``None`` if that is not known.

    See :func:`d9d_core.data.packs_documents`.
    """
    evaluation = job.evaluation if isinstance(job, JobConfig) else None
    return packs_documents(job.data, *(evaluation.datasets.values() if evaluation else ()))


def split_of(task: CheckedTask, topology: Topology) -> Callable[[Microbatch], Microbatch] | None:
    """Function that takes this rank's positions of a microbatch; ``None`` if it has all of them.

    Raises:
        JobError: the task needs all positions of a sample.
    """
    ranks = topology.sizes.get("cp", 1)
    return None if ranks == 1 else task.split(ZigzagPositions(ranks, topology.coordinate["cp"]))


def open_data(
    job: BaseJob,
    topology: Topology,
    chosen: Chosen,
    config: Any,
    note: Callable[[str], None],
    one_pass: bool = False,
    inputs: TextInputs = "own",
) -> DataStream:
    """Open a dataset for this rank.

    Args:
        job: has the sizes of batches, the seed and the model.
        topology: this process among others.
        chosen: record of the dataset.
        config: of the dataset.
        note: prints a line about long work.
        one_pass: every sample once, in order; see :mod:`d9d_core.data`.
        inputs: tokens of a text that are inputs.

    Raises:
        DataError: it cannot be opened.
    """
    context = DataContext(
        seed=job.seed,
        batch_size=job.batch.size,
        microbatch_size=job.microbatch_size,
        cache_dir=job.run.cache,
        rank=topology.data_parallel_rank,
        ranks=topology.data_parallel_size,
        note=note,
        pretrained=job.model.pretrained if isinstance(job.model, ModelConfig) else None,
        one_pass=one_pass,
        inputs=inputs,
    )
    stream: DataStream = instantiate(chosen, config, context)
    return stream
