"""Names of checkpoints, and removal of those that are kept no longer."""

from __future__ import annotations

from collections.abc import Collection

from d9d_core.errors import CheckpointError
from d9d_weights.files.directory import DirectoryStore
from d9d_weights.sharding.agreement import reason

from d9d_engine.checkpoint.manifest import read_manifest
from d9d_engine.checkpoint.retention import Retention

_PREFIX = "step-"


def folder(step: int) -> str:
    """Name of the checkpoint of a step, such as ``step-00000100``."""
    return f"{_PREFIX}{step:08d}"


def steps_in(storage: DirectoryStore) -> list[int]:
    """Steps of the checkpoints that exist, newest first, unverified."""
    numbers = [name.removeprefix(_PREFIX) for name in storage.names() if name.startswith(_PREFIX)]
    return sorted((int(number) for number in numbers if number.isdigit()), reverse=True)


class Pruner:
    """Pruner: removes old checkpoints, on one rank only.

    Args:
        storage: where they lie.
        retention: which ones stay.
    """

    def __init__(self, storage: DirectoryStore, retention: Retention) -> None:
        self._storage = storage
        self._retention = retention
        self._scores: dict[int, float | None] = {}

    def prune(self, saved: int) -> str | None:
        """Remove what is kept no longer now that step ``saved`` exists; returns what went wrong."""
        try:
            steps = steps_in(self._storage)
            self._scores.pop(saved, None)  # it may have been written anew
            for step in self._retention.surplus(steps, self._scores_of(steps), saved):
                self._storage.remove(folder(step))
        except OSError as error:
            return f"an old checkpoint could not be removed: {reason(error)}"
        return None

    def _scores_of(self, steps: Collection[int]) -> dict[int, float]:
        best = self._retention.best
        if best is None:
            return {}
        for step in set(steps) - self._scores.keys():
            try:
                score = read_manifest(self._storage, folder(step)).get("score", {})
            except CheckpointError:
                score = {}  # damaged: it cannot be the best
            self._scores[step] = score.get("value") if score.get("series") == best.series else None
        return {step: score for step in steps if (score := self._scores[step]) is not None}
