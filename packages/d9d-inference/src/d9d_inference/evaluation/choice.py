"""Choice of a run's checkpoint: the newest, the best, or the checkpoint of a given step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from d9d_core.errors import CheckpointError
from d9d_engine.checkpoint.saved import Checkpoint
from d9d_engine.checkpoint.store import CheckpointStore
from d9d_weights.checkpoint.names import folder

#: Choice of a checkpoint: the newest, the best, or the checkpoint of this step.
Which = Literal["newest", "best"] | int


def choose_checkpoint(store: CheckpointStore, which: Which, warn: Callable[[str], None]) -> Checkpoint | None:
    """Choose and open a checkpoint; ``None`` if the newest is wanted and none exists. Collective over all ranks.

    Args:
        store: checkpoint store of the run; its retention rules define the best checkpoint.
        which: ``newest``, ``best`` or a step.
        warn: called with a text on the first rank.

    Raises:
        CheckpointError: the checkpoint does not exist or is damaged; or ``best`` is wanted, but the job does not define
            the best checkpoint.
    """
    if which == "newest":
        return store.newest(warn)
    steps = store.steps()
    if which == "best":
        which = _best(store)
    if which not in steps:
        there = ", ".join(map(str, sorted(steps))) or "none"
        raise CheckpointError(f"{store.directory} has no checkpoint of step {which}; there are: {there}")
    return store.open(folder(which))


def _best(store: CheckpointStore) -> int:
    """Step of the best checkpoint. Collective over all ranks."""
    rule, found = store.retention.best, store.best()
    if rule is None:
        raise CheckpointError(f"{store.directory}: the job has no 'checkpoint.best', which defines the best checkpoint")
    if found is None:
        raise CheckpointError(
            f"{store.directory}: no checkpoint has a value of '{rule.series}', so there is no best checkpoint"
        )
    return found[0]
