"""Values by which checkpoints are ranked, and removal of old checkpoints."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from d9d_core.errors import CheckpointError
from d9d_weights.checkpoint.manifest import read_manifest
from d9d_weights.checkpoint.names import folder, steps_in
from d9d_weights.files.directory import DirectoryStore
from d9d_weights.sharding.agreement import reason

from d9d_engine.checkpoint.retention import Retention


class Pruner:
    """Ranks checkpoints and removes old checkpoints, on one rank only.

    Args:
        storage: directory of the checkpoints.
        retention: rules that choose the checkpoints to keep.
        foreign: steps whose folders were not written by a save of that step; these folders are kept and not counted.
    """

    def __init__(self, storage: DirectoryStore, retention: Retention, foreign: set[int]) -> None:
        self._storage = storage
        self._retention = retention
        self._foreign = foreign
        self._scores: dict[int, float | None] = {}

    def prune(self, saved: int, kept_before: Iterable[int] = ()) -> str | None:
        """Remove surplus checkpoints now that step ``saved`` exists; see :meth:`Retention.surplus`.

        Returns:
            Text of the failure if a checkpoint could not be removed, else ``None``.
        """
        self._foreign.discard(saved)  # the save has replaced a foreign folder of this step
        try:
            steps = self._steps()
            self._scores.pop(saved, None)  # the checkpoint may have been rewritten
            for step in self._retention.surplus(steps, self._scores_of(steps), saved, kept_before):
                self._storage.remove(folder(step))
        except OSError as error:
            return f"an old checkpoint could not be removed: {reason(error)}"
        return None

    def best(self) -> tuple[int, float] | None:
        """Step and value of the best checkpoint by the rule ``best``; ``None`` without the rule or any value."""
        rule, scores = self._retention.best, self._scores_of(self._steps())
        return (step := rule.ranked(scores)[0], scores[step]) if rule is not None and scores else None

    def _steps(self) -> list[int]:
        return [step for step in steps_in(self._storage) if step not in self._foreign]

    def _scores_of(self, steps: Collection[int]) -> dict[int, float]:
        best = self._retention.best
        if best is None:
            return {}
        for step in set(steps) - self._scores.keys():
            try:
                score = read_manifest(self._storage, folder(step)).get("score") or {}
            except CheckpointError:
                score = {}  # a damaged checkpoint cannot be the best
            self._scores[step] = score.get("value") if score.get("series") == best.series else None
        return {step: score for step in steps if (score := self._scores[step]) is not None}
