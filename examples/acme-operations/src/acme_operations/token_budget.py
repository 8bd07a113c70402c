"""Job check ``token_budget``: a job reads no more tokens than the environment variable ``ACME_TOKEN_BUDGET``."""

from __future__ import annotations

import os
from typing import Any

from d9d_core.errors import JobError
from d9d_core.job import JobFile
from d9d_core.terminal.console import console_for

VARIABLE = "ACME_TOKEN_BUDGET"


def check(job: JobFile, world_size: int | None) -> None:  # noqa: ARG001 - the batch counts the samples of all processes
    """Print the number of tokens that a job reads, and compare it with the budget.

    Args:
        job: job that ``d9d check`` has read.
        world_size: number of processes; ``None`` for as many as the mesh needs.

    Raises:
        JobError: the job reads more tokens than the budget, or the budget is not a number.
    """
    data: Any = job.data
    length = getattr(data, "sequence_length", None)
    if job.steps is None or length is None:
        console_for().print("token budget: unknown number of tokens, so no check")
        return
    tokens, budget = job.steps * job.batch.size * length, os.environ.get(VARIABLE, "")
    console_for().print(f"token budget: {tokens:,} tokens of {budget or 'no limit'}")
    if budget and not budget.isdecimal():
        raise JobError(f"{VARIABLE} is '{budget}'; write a number of tokens, such as 1000000")
    if budget and tokens > int(budget):
        raise JobError(
            f"steps: {job.steps} steps of {job.batch.size} x {length} tokens are {tokens:,} tokens, more than "
            f"{VARIABLE}={budget}; take fewer steps or smaller batches"
        )
