"""Lines about the measured time of a step. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from d9d_engine.profiling.summary import LABELS

from d9d_planner.profile.verdict import verdict

if TYPE_CHECKING:
    from d9d_engine.job import Job

    from d9d_planner.profile.measure import Measured


def lines(found: Measured, job: Job, predicted: tuple[float | None, str]) -> Iterator[str]:
    """Lines of a profile: the time of a step, its parts, what limits the speed, advice, and the predicted time.

    Args:
        found: measured times of the first rank.
        job: the job.
        predicted: predicted seconds of a step, or the reason why there is no prediction.
    """
    memory = "" if found.memory is None else f", peak memory {found.memory / 2**30:.1f} GiB"
    yield f"step: {found.step * 1e3:.2f} ms, {found.tokens / found.step:,.0f} tokens/s{memory}"
    yield f"  waits for data          {_row(found.waits, found.step)}"
    yield f"  host launches work      {_row(found.host, found.step)}"
    recorded = f"CPU in recorded steps, which are slower: {found.recorded * 1e3:.2f} ms"
    yield f"time of the {'GPU' if found.on_device else recorded}"
    for kind, label in LABELS.items():
        yield f"  {label:<22}  {_row(found.kinds.get(kind, 0.0), found.recorded)}"
    count = job.batch.size // max(1, job.microbatch_size * job.mesh.data_parallel_size)
    names = [strategy.selector for strategy in job.parallel]
    seconds, why = predicted
    reason = verdict(found, seconds, names, type(job.data).model_fields, count, job.mesh.world_size)
    yield f"cause: {reason.cause}: {reason.reason}"
    yield from (f"  try {text}" for text in reason.advice)
    if seconds is None:
        yield f"prediction: none, because {why}"
    else:
        yield (
            f"prediction: {seconds * 1e3:.2f} ms per step without waits and launches, with this machine's rates "
            f"(measured {found.step / seconds:.2f} x)"
        )


def _row(taken: float, whole: float) -> str:
    return f"{taken * 1e3:10.2f} ms {taken / whole if whole else 0:7.1%}"
