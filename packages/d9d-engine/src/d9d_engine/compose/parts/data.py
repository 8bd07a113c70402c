"""Data of a job: dataset of this rank, positions of this rank, and number of steps from epochs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from d9d_core.components.instantiate import instantiate
from d9d_core.config import ModelConfig
from d9d_core.data import DataContext, DataStream, TextInputs, packs_documents
from d9d_core.errors import JobError
from d9d_core.job_file.job import BaseJob, JobConfig
from d9d_core.model import SeesOneDocument
from d9d_core.registry.capabilities import Chosen
from d9d_core.types import Microbatch, State
from torch import nn

from d9d_engine.distributed.mesh import Topology
from d9d_engine.distributed.positions import ZigzagPositions
from d9d_engine.step.checked_task import CheckedTask


def documents_of(job: BaseJob) -> bool | None:
    """Whether samples of the job, evaluations included, hold several documents; ``None`` if unknown.

    See :func:`d9d_core.data.packs_documents`.
    """
    evaluation = job.evaluation if isinstance(job, JobConfig) else None
    return packs_documents(job.data, *(evaluation.datasets.values() if evaluation else ()))


def check_documents(job: BaseJob, stages: Sequence[nn.Module]) -> None:
    """Check that the model keeps documents of a sample apart, if the data packs them.

    Raises:
        JobError: the data packs documents, and the model has modules that mix tokens of different documents.
    """
    mixers = [name for stage in stages if isinstance(stage, SeesOneDocument) for name in stage.token_mixers()]
    if mixers and documents_of(job):
        raise JobError(
            f"data: samples hold several documents, and module {mixers[0]} of the model would mix their tokens; use "
            "data with one document in each sample, such as chat with packing: none"
        )


def split_of(task: CheckedTask, topology: Topology) -> Callable[[Microbatch], Microbatch] | None:
    """Function that selects this rank's positions of a microbatch; ``None`` if the rank has all positions.

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
    """Open a dataset of a job for this rank.

    Args:
        job: job with the batch sizes, the seed and the model.
        topology: rank, device, meshes and process groups of this process.
        chosen: plugin record of the dataset.
        config: config of the dataset.
        note: prints a line about a long operation.
        one_pass: read every sample once, in order; see :mod:`d9d_core.data`.
        inputs: which tokens of a text are model inputs.

    Raises:
        DataError: the dataset cannot be opened.
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


def count_steps(job: JobConfig, dataset: Chosen, facts: State, note: Callable[[str], None]) -> int:
    """Number of optimizer steps of a job: as given, or computed from its epochs and rounded up.

    Args:
        job: validated job.
        dataset: plugin record of the dataset.
        facts: facts of the opened dataset.
        note: called with a line about steps computed from epochs.

    Raises:
        JobError: the job counts in epochs, and the dataset does not give the number of samples.
    """
    if job.steps is not None:
        return job.steps
    assert job.epochs is not None
    samples = facts.get("samples")
    if not isinstance(samples, int) or isinstance(samples, bool) or samples < 1:
        said = (
            "does not give the number of samples in an epoch"
            if samples is None
            else f"gives {samples!r} as the number of samples in an epoch"
        )
        raise JobError(f"epochs: dataset {dataset.entry} {said}; replace 'epochs' by 'steps'")
    # Exact decimal arithmetic: 1.1 epochs of 10 samples are 11 samples, not 12 by a rounding error.
    steps = math.ceil(Fraction(str(job.epochs)) * samples / job.batch.size)
    note(f"epochs: {job.epochs:g} of {samples:,} samples each are {steps:,} steps of {job.batch.size:,}")
    return steps


def summary_of(job: JobConfig, facts: State) -> str:
    """Summary of a job's data in a line: dataset and size, sequence length and padding, evaluation.

    Args:
        job: validated job.
        facts: facts of the opened dataset; the summary has some of them, ``facts.json`` in the run's directory has all.
    """
    units = {"samples": "samples", "tokens": "tokens", "learned_tokens": "learned"}
    size = [job.data.selector, *(f"{facts[name]:,} {unit}" for name, unit in units.items() if _is_count(facts, name))]
    parts = [", ".join(size)]
    if _is_count(facts, "sequence_length"):
        unused = facts.get("unused_positions")
        padding = f", {unused:.1%} padding" if isinstance(unused, float) and unused else ""
        parts.append(f"length {facts['sequence_length']:,}{padding}")
    parts.append(f"evaluated every {job.evaluation.every:,} steps" if job.evaluation else "no evaluation")
    return "; ".join(parts)


def _is_count(facts: State, name: str) -> bool:
    return isinstance(facts.get(name), int) and not isinstance(facts[name], bool)
