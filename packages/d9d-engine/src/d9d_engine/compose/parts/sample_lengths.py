"""Lengths of microbatches that the ranks of a job can share, as far as its config tells them."""

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
    """Compare sample lengths of microbatches, as far as configs of data tell them, with the ranks that split them.

    The data is that of training and of each evaluation.

    Raises:
        JobError: they do not divide every length.
    """
    if not isinstance(job, JobConfig):
        return  # an inference makes one pass, whose last lengths are others
    context = job.mesh.cp
    # Ranks of cp have two chunks of each sample, see d9d_engine.distributed.positions.
    steps = {f"mesh.cp: {context} ranks have two chunks of positions each": 2 * context if context > 1 else 1}
    for chosen, outcome in applied:
        whose = f"{chosen.where}: strategy '{chosen.spec.name}' splits positions over {outcome.sequence_ranks} ranks"
        steps[f"{whose}{f', those of each of {context} ranks of cp' * (context > 1)}"] = (
            outcome.sequence_ranks * context
        )
    for where, data in _datasets(job):
        lengths = sample_lengths(data)
        if lengths is None:
            continue
        for who, step in steps.items():
            if lengths.multiple % step:
                near = " or ".join(map(str, near_multiples(lengths.multiple, math.lcm(*steps.values()))))
                are, name = ("", "sequence_length") if lengths.fixed else ("multiples of ", "pad_multiple")
                text = f"those of a microbatch are {are}{lengths.multiple} ({where}.{name})"
                raise JobError(f"{who}, but {text}; use {near}, or other sizes of the mesh")


def _datasets(job: JobConfig) -> Iterator[tuple[str, PluginConfig]]:
    """Datasets of training and evaluation, each with its place in the job file."""
    yield "data", job.data
    if job.evaluation is not None:
        for name, data in job.evaluation.datasets.items():
            yield f"evaluation.sets.{name}" if name else "evaluation.data", data
