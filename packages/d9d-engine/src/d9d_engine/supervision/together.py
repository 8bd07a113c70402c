"""Agreement of ranks about a failure: if the run failed on any rank, it has failed on all ranks."""

from __future__ import annotations

from collections.abc import Callable

from d9d_core.failures import exits_are_errors
from d9d_core.types import Json
from d9d_weights.sharding.collectives import all_gather_objects
from torch import distributed as dist

from d9d_engine.supervision.failure import Failure, OtherRankError, headline


def fail_together(action: Callable[[], object], who: str, group: dist.ProcessGroup | None) -> None:
    """Run a function on every rank; if it fails on any rank, raise on all ranks. Collective over ``group``.

    Args:
        action: function to run; it does not communicate.
        who: rank and machine of this process.
        group: process group of all ranks; ``None`` for one process.

    Raises:
        Exception: the function failed here; the same exception.
        OtherRankError: the function failed on another rank; of several failures, one with the highest exit status is
            named, such as an error of the job.
    """
    failure: Exception | None = None
    try:
        with exits_are_errors():
            action()
    except Exception as error:
        failure = error
    if group is not None:
        told: Json = None if failure is None else [Failure.of(failure).exit_code, who, headline(failure)]
        found = [one for one in all_gather_objects(told, group) if one is not None]
        if found and failure is None:
            status, other, text = max(found, key=lambda one: int(one[0]))
            raise OtherRankError(other, text, status)
    if failure is not None:
        raise failure
