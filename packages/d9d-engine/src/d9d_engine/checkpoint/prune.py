"""Removal of checkpoints that are not kept."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from d9d_core.errors import CheckpointError
from d9d_weights.checkpoint.manifest import read_manifest
from d9d_weights.checkpoint.names import folder, steps_in
from d9d_weights.files.directory import DirectoryStore
from d9d_weights.sharding.agreement import reason

from d9d_engine.checkpoint.retention import Retention


class Pruner:
    """Pruner: removes old checkpoints, on one rank only.

    Args:
        storage: where they lie.
        retention: which ones stay.
        foreign: steps whose folders hold something else; they stay, and do not count.
    """

    def __init__(self, storage: DirectoryStore, retention: Retention, foreign: set[int]) -> None:
        self._storage = storage
        self._retention = retention
        self._foreign = foreign
        self._scores: dict[int, float | None] = {}

    def prune(self, saved: int, kept_before: Iterable[int] = ()) -> str | None:
        """Remove the checkpoints that are not kept now that step ``saved`` exists; see :meth:`Retention.surplus`.

        Returns:
            What went wrong, if anything did.
        """
        self._foreign.discard(saved)  # if it was one, it is replaced now
        try:
            steps = [step for step in steps_in(self._storage) if step not in self._foreign]
            self._scores.pop(saved, None)  # it may have been written anew
            for step in self._retention.surplus(steps, self._scores_of(steps), saved, kept_before):
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
                score = read_manifest(self._storage, folder(step)).get("score") or {}
            except CheckpointError:
                score = {}  # damaged: it cannot be the best
            self._scores[step] = score.get("value") if score.get("series") == best.series else None
        return {step: score for step in steps if (score := self._scores[step]) is not None}
