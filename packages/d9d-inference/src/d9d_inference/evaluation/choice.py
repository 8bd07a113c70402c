"""Choice of a run's checkpoint: the newest, the best, or the checkpoint of a given step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from d9d_core.errors import CheckpointError
from d9d_engine.checkpoint.saved import Checkpoint
from d9d_engine.checkpoint.store import CheckpointStore
from d9d_weights.checkpoint.manifest import read_manifest
from d9d_weights.checkpoint.names import folder
from d9d_weights.files.open import open_store
from d9d_weights.sharding.agreement import on_main

#: Choice of a checkpoint: newest, best, or a step.
Which = Literal["newest", "best"] | int


def choose_checkpoint(store: CheckpointStore, which: Which, warn: Callable[[str], None]) -> Checkpoint | None:
    """Choose and open a checkpoint; ``None`` if the newest is wanted and none exists. Collective over all ranks.

    Args:
        store: checkpoint store of the run; its retention rules define the best checkpoint.
        which: ``newest``, ``best`` or a step.
        warn: called with a text on the first rank.

    Raises:
        CheckpointError: the checkpoint does not exist, or is damaged.
    """
    if which == "newest":
        return store.newest(warn)
    steps = store.steps()
    if which == "best":
        which = on_main(lambda: _best(store, steps), store.group)
    if which not in steps:
        there = ", ".join(map(str, sorted(steps))) or "none"
        raise CheckpointError(f"{store.directory} has no checkpoint of step {which}; there are: {there}")
    return store.open(folder(which))


def _best(store: CheckpointStore, steps: list[int]) -> int:
    """Step of the best checkpoint; of equally good checkpoints, the newest."""
    rule = store.retention.best
    if rule is None:
        raise CheckpointError(f"{store.directory}: the job has no 'checkpoint.best', which defines the best checkpoint")
    storage, scores = open_store(store.directory), {}
    for step in steps:
        score = read_manifest(storage, folder(step)).get("score") or {}
        if score.get("series") == rule.series:
            scores[step] = score["value"]
    if not scores:
        raise CheckpointError(
            f"{store.directory}: no checkpoint has a value of '{rule.series}', so there is no best checkpoint"
        )
    sign = 1 if rule.mode == "min" else -1
    return min(scores, key=lambda step: (sign * scores[step], -step))
