"""A chain of phases.

Every phase reaches its value in its own last step: of a phase of n steps that goes from a to b, step k (0-based) uses
the curve at (k + 1) / n. So a warm-up from 0 wastes no step at 0, and borders have no jump.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from d9d_core.extend import JobError, LrSchedule

from d9d_optim.schedule.config import Phase, PiecewiseConfig
from d9d_optim.schedule.curves import interpolate


@dataclass(frozen=True, slots=True)
class Piece:
    """A phase with its place in the run: steps ``first`` to ``end`` (exclusive), departing from ``begin``."""

    first: int
    end: int
    begin: float
    phase: Phase

    def at(self, step: int) -> float:
        """The factor of a step inside the piece."""
        progress = (step - self.first + 1) / (self.end - self.first)
        power = 2.0 if self.phase.power is None else self.phase.power
        return interpolate(self.phase.curve, self.begin, self.phase.to, progress, power)


@dataclass(frozen=True, slots=True)
class Chain:
    """Pieces without gaps. Past the end, the last factor holds."""

    pieces: tuple[Piece, ...]

    def __call__(self, step: int) -> float:
        """The factor used in step ``step`` (0-based)."""
        step = min(step, self.pieces[-1].end - 1)
        return self.pieces[bisect.bisect_right(self.pieces, step, key=lambda piece: piece.end)].at(step)


def piecewise(config: PiecewiseConfig, total_steps: int) -> LrSchedule:
    """Lay the phases out over the run.

    Raises:
        JobError: the phases are longer or shorter than the run, or one of them gets no step.
    """
    pieces: list[Piece] = []
    first, begin = 0, config.start
    for index, phase in enumerate(config.phases):
        end = _end(phase, first, total_steps)
        where = f"lr_schedule.phases[{index}]"
        if end > total_steps:
            raise JobError(
                f"{where} ends at step {end}, but the run has {total_steps} steps; shorten the phases or train longer"
            )
        if end <= first:
            raise JobError(
                f"{where} gets no step: it begins at step {first} and ends at step {end} of {total_steps}; "
                "shorten the phases before it, remove it, or train longer"
            )
        pieces.append(Piece(first, end, begin, phase))
        first, begin = end, phase.to
    if first < total_steps:
        raise JobError(
            f"lr_schedule.phases end at step {first}, but the run has {total_steps} steps; "
            "let the last phase take the rest by giving it neither steps nor until"
        )
    return Chain(tuple(pieces))


def _end(phase: Phase, first: int, total_steps: int) -> int:
    if phase.steps is not None:
        return first + phase.steps
    return total_steps if phase.until is None else round(phase.until * total_steps)
