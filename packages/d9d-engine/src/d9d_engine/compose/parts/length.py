"""Length of a run in optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

from d9d_core.errors import JobError
from d9d_core.job_file.job import JobConfig
from d9d_core.registry.capabilities import Chosen
from d9d_core.types import State


def count_steps(job: JobConfig, dataset: Chosen, facts: State, note: Callable[[str], None]) -> int:
    """Number of optimizer steps of a run: as the job says, or as many as its epochs need, the last one rounded up.

    Args:
        job: validated.
        dataset: record behind the data.
        facts: of the open data.
        note: told about steps that follow from epochs.

    Raises:
        JobError: the job counts in epochs, and the data does not say how many samples an epoch has.
    """
    if job.steps is not None:
        return job.steps
    assert job.epochs is not None
    samples = facts.get("samples")
    if not isinstance(samples, int) or isinstance(samples, bool) or samples < 1:
        said = "does not say how many samples an epoch has" if samples is None else f"says {samples!r} samples an epoch"
        raise JobError(f"epochs: dataset {dataset.entry} {said}; give the length of the run as 'steps:'")
    # Of the digits that the job file has: 1.1 epochs of 10 samples are 11, not a little more.
    steps = math.ceil(Fraction(str(job.epochs)) * samples / job.batch.size)
    note(f"epochs: {job.epochs:g} of {samples:,} samples each are {steps:,} steps of {job.batch.size:,}")
    return steps
