"""Learning-rate schedules: constant, cosine and piecewise.

Every phase reaches its value in its own last step: of a phase of n steps that goes from a to b, step k (0-based) uses
the curve at (k + 1) / n. So a warm-up from 0 wastes no step at 0, and borders have no jump.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass
from typing import assert_never

from d9d_core.extend import JobError, LrSchedule

from d9d_optim.schedule.config import ConstantConfig, CosineConfig, CurveName, Phase, PiecewiseConfig


def constant(config: ConstantConfig, total_steps: int) -> LrSchedule:  # noqa: ARG001 - the signature of LrScheduleSpec
    """Constant schedule: the factor is 1 in every step."""
    return lambda step: 1.0  # noqa: ARG005 - the same for all steps


def cosine(config: CosineConfig, total_steps: int) -> LrSchedule:
    """Linear warm-up for ``warmup_steps``, then cosine decay to ``min_factor``, which the last step uses.

    Loshchilov and Hutter, SGDR, equation 5, without restarts.

    Raises:
        JobError: the warm-up leaves no step for the decay.
    """
    if config.warmup_steps >= total_steps:
        raise JobError(
            f"lr_schedule.warmup_steps is {config.warmup_steps}, but the run has {total_steps} steps; "
            f"use at most {total_steps - 1}, or train longer"
        )
    decay = PlacedPhase(config.warmup_steps, total_steps, 1.0, Phase(to=config.min_factor, curve="cosine"))
    if config.warmup_steps == 0:
        return Chain((decay,))
    return Chain((PlacedPhase(0, config.warmup_steps, 0.0, Phase(to=1.0)), decay))


@dataclass(frozen=True, slots=True)
class PlacedPhase:
    """Phase with its place in the run: steps ``first`` to ``end`` (exclusive), departing from ``begin``."""

    first: int
    end: int
    begin: float
    phase: Phase

    def at(self, step: int) -> float:
        """Factor of a step inside the phase."""
        progress = (step - self.first + 1) / (self.end - self.first)
        power = 2.0 if self.phase.power is None else self.phase.power
        return interpolate(self.phase.curve, self.begin, self.phase.to, progress, power)


@dataclass(frozen=True, slots=True)
class Chain:
    """Chain of phases without gaps. Past the end, the last factor holds."""

    pieces: tuple[PlacedPhase, ...]

    def __call__(self, step: int) -> float:
        """Factor used in step ``step`` (0-based)."""
        step = min(step, self.pieces[-1].end - 1)
        return self.pieces[bisect.bisect_right(self.pieces, step, key=lambda piece: piece.end)].at(step)


def piecewise(config: PiecewiseConfig, total_steps: int) -> LrSchedule:
    """Piecewise schedule: lay the phases out over the run.

    Raises:
        JobError: the phases are longer or shorter than the run, or one of them gets no step.
    """
    pieces: list[PlacedPhase] = []
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
        pieces.append(PlacedPhase(first, end, begin, phase))
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


def interpolate(curve: CurveName, begin: float, end: float, progress: float, power: float = 2.0) -> float:
    """Value of a monotone curve at ``progress``, from ``begin`` (0) to ``end`` (1); both ends are exact.

    With t for the progress: linear is straight in t, cosine in (1 - cos(pi t)) / 2, poly in 1 - (1 - t)**power, and
    exponential is straight in the logarithm of the value, so both values must be positive.
    """
    if curve == "exponential":
        return math.pow(begin, 1 - progress) * math.pow(end, progress)
    if curve == "linear":
        remaining = 1 - progress
    elif curve == "cosine":
        remaining = (1 + math.cos(math.pi * progress)) / 2
    elif curve == "poly":
        remaining = math.pow(1 - progress, power)
    else:
        assert_never(curve)
    return end + (begin - end) * remaining
