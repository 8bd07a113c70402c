"""Names of checkpoints, and removal of those that are kept no longer."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from d9d_core.errors import CheckpointError
from d9d_weights.files.directory import DirectoryStore, is_set_aside
from d9d_weights.sharding.agreement import reason

from d9d_engine.checkpoint.manifest import read_manifest
from d9d_engine.checkpoint.retention import Retention

_PREFIX = "step-"
_NAME = re.compile(rf"{_PREFIX}([0-9]{{8,18}})")


def folder(step: int) -> str:
    """Name of the checkpoint of a step, such as ``step-00000100``."""
    return f"{_PREFIX}{step:08d}"


def step_of(name: str) -> int | None:
    """Step of the checkpoint that has this name; ``None`` if no checkpoint is called so."""
    match = _NAME.fullmatch(name)
    step = int(match[1]) if match else None
    return step if step is not None and folder(step) == name else None


def steps_in(storage: DirectoryStore) -> list[int]:
    """Steps of the checkpoints that exist, newest first, unverified."""
    return sorted((step for name in storage.names() if (step := step_of(name)) is not None), reverse=True)


def strays_in(storage: DirectoryStore) -> list[str]:
    """Names that look like checkpoints, but are none that is written or set aside here."""
    return sorted(
        name
        for name in storage.names()
        if name.startswith(_PREFIX) and step_of(name) is None and not is_set_aside(name)
    )


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
