"""Rules that choose which checkpoints are kept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class BestOf:
    """Rule that keeps the checkpoints with the best values of a logged series.

    Attributes:
        series: name of the series.
        mode: whether low or high values are better.
        keep: number of checkpoints to keep.
    """

    series: str
    mode: Literal["min", "max"]
    keep: int

    def ranked(self, scores: Mapping[int, float]) -> list[int]:
        """Steps from the best to the worst; of equal values, the oldest step first.

        A checkpoint that is saved between two evaluations has the value of an older step, whose weights were evaluated.

        Args:
            scores: step -> value of the series.
        """
        sign = 1 if self.mode == "min" else -1
        return sorted(scores, key=lambda step: (sign * scores[step], step))


@dataclass(frozen=True, slots=True)
class Retention:
    """Retention rules for checkpoints; a checkpoint is kept if any rule keeps it.

    Attributes:
        newest: number of newest checkpoints to keep; ``None`` keeps all.
        every: also keep checkpoints whose step is a multiple of this number; ``None`` without this rule.
        best: also keep the checkpoints with the best values of a series; ``None`` without this rule.
    """

    newest: int | None = None
    every: int | None = None
    best: BestOf | None = None

    def surplus(
        self, steps: Iterable[int], scores: Mapping[int, float], saved: int, kept_before: Iterable[int] = ()
    ) -> list[int]:
        """List the steps whose checkpoints no rule keeps, so that they are to be removed; oldest first.

        Args:
            steps: steps of the existing checkpoints.
            scores: step -> value of the series; steps without a value are never the best.
            saved: step that was just saved; it is kept and counts as the newest.
            kept_before: for each of these steps, the last checkpoint before it is kept.
        """
        if self.newest is None:
            return []
        steps = sorted(steps)
        others = [step for step in steps if step != saved]
        kept = {saved, *others[max(0, len(others) + 1 - self.newest) :]}
        if self.every is not None:
            kept |= {step for step in steps if step % self.every == 0}
        if self.best is not None:
            kept |= set(self.best.ranked({step: scores[step] for step in steps if step in scores})[: self.best.keep])
        kept |= {max(earlier) for bound in kept_before if (earlier := [step for step in steps if step < bound])}
        return [step for step in steps if step not in kept]
