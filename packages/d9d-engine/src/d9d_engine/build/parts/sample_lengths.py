"""Lengths of microbatches that the ranks of a job can share, as far as its config tells them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from d9d_core.config.job import BaseJob, JobConfig
from d9d_core.errors import JobError
from d9d_core.layout.check import near_multiples
from d9d_core.plugin.capabilities import Chosen
from d9d_core.protocols.data import sample_lengths
from d9d_core.protocols.strategy import Applied


def check_lengths(job: BaseJob, applied: Sequence[tuple[Chosen, Applied]]) -> None:
    """Compare the lengths of microbatches, as far as the data's config tells them, with the ranks that split them.

    Raises:
        JobError: they do not divide every length.
    """
    lengths = sample_lengths(job.data)
    if lengths is None or not isinstance(job, JobConfig):
        return  # an inference makes one pass, whose last lengths are others
    multiple, context = lengths.multiple, job.mesh.cp
    # Ranks of cp have two chunks of each sample, see d9d_engine.distributed.positions.
    steps = {f"mesh.cp: {context} ranks have two chunks of positions each": 2 * context if context > 1 else 1}
    for chosen, outcome in applied:
        whose = f"{chosen.where}: strategy '{chosen.spec.name}' splits positions over {outcome.sequence_ranks} ranks"
        steps[f"{whose}{f', those of each of {context} ranks of cp' * (context > 1)}"] = (
            outcome.sequence_ranks * context
        )
    for who, step in steps.items():
        if multiple % step:
            near = " or ".join(map(str, near_multiples(multiple, math.lcm(*steps.values()))))
            are, name = ("", "sequence_length") if lengths.fixed else ("multiples of ", "pad_multiple")
            text = f"those of a microbatch are {are}{multiple} (data.{name}); use {near}, or other sizes of the mesh"
            raise JobError(f"{who}, but {text}")
