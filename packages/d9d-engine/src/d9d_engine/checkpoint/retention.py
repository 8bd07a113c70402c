"""Retention of checkpoints: which of them stay."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class BestOf:
    """Rule that keeps the checkpoints with the best values of a logged series.

    Attributes:
        series: its name.
        mode: which values are better.
        keep: how many checkpoints.
    """

    series: str
    mode: Literal["min", "max"]
    keep: int


@dataclass(frozen=True, slots=True)
class Retention:
    """Rules of retention of checkpoints; one stays if any of them says so.

    Attributes:
        newest: how many of the newest; ``None`` keeps all.
        every: those whose step is a multiple of this.
        best: those with the best values.
    """

    newest: int | None = None
    every: int | None = None
    best: BestOf | None = None

    def surplus(
        self, steps: Iterable[int], scores: Mapping[int, float], saved: int, kept_before: Iterable[int] = ()
    ) -> list[int]:
        """Steps whose checkpoints are removed, oldest first.

        Args:
            steps: of the checkpoints that exist.
            scores: step -> value of the series; those without a value are never the best.
            saved: the step that was saved just now, which stays and counts as the newest.
            kept_before: steps before each of which the last checkpoint stays.
        """
        if self.newest is None:
            return []
        steps = sorted(steps)
        others = [step for step in steps if step != saved]
        kept = {saved, *others[max(0, len(others) + 1 - self.newest) :]}
        if self.every is not None:
            kept |= {step for step in steps if step % self.every == 0}
        if self.best is not None:
            sign = 1 if self.best.mode == "min" else -1
            ranked = sorted((s for s in steps if s in scores), key=lambda step: (sign * scores[step], -step))
            kept |= set(ranked[: self.best.keep])
        kept |= {max(earlier) for bound in kept_before if (earlier := [step for step in steps if step < bound])}
        return [step for step in steps if step not in kept]
