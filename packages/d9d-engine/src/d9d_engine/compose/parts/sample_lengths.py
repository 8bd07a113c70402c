"""Check that sample lengths can be split over the ranks of a job, as far as configs give the lengths."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from d9d_core.config import PluginConfig
from d9d_core.data import sample_lengths
from d9d_core.errors import JobError
from d9d_core.job_file.job import BaseJob, JobConfig
from d9d_core.layout.check import near_multiples
from d9d_core.registry.capabilities import Chosen
from d9d_core.strategy import Applied


def check_lengths(job: BaseJob, applied: Sequence[tuple[Chosen, Applied]]) -> None:
    """Check that ranks can split the sample lengths of training and evaluations, as far as configs give the lengths.

    Raises:
        JobError: a sample length is not a multiple of the number of parts into which ranks split samples.
    """
    if not isinstance(job, JobConfig):
        return  # inference makes one pass, in which the last microbatches differ in length
    context = job.mesh.cp
    # A rank of cp has two chunks of each sample, see d9d_engine.distributed.positions.
    steps = {f"mesh.cp: {context} ranks split each sample into two chunks each": 2 * context if context > 1 else 1}
    for chosen, outcome in applied:
        whose = f"{chosen.where}: strategy '{chosen.spec.name}' splits positions over {outcome.sequence_ranks} ranks"
        steps[f"{whose}{f', within each of {context} ranks of cp' * (context > 1)}"] = outcome.sequence_ranks * context
    for where, data in _datasets(job):
        lengths = sample_lengths(data)
        if lengths is None:
            continue
        for who, step in steps.items():
            if lengths.multiple % step:
                near = " or ".join(map(str, near_multiples(lengths.multiple, math.lcm(*steps.values()))))
                are, name = ("", "sequence_length") if lengths.fixed else ("multiples of ", "pad_multiple")
                text = f"sequence lengths are {are}{lengths.multiple} ({where}.{name})"
                raise JobError(f"{who}, but {text}; use {near}, or other sizes of the mesh")


def _datasets(job: JobConfig) -> Iterator[tuple[str, PluginConfig]]:
    """Datasets of training and evaluation, each with its field in the job file."""
    yield "data", job.data
    if job.evaluation is not None:
        for name, data in job.evaluation.datasets.items():
            yield f"evaluation.sets.{name}" if name else "evaluation.data", data
