"""Learning-rate schedules: piecewise, and presets made of its phases.

Every phase reaches its factor in its own last step: in a phase of n steps from a to b, step k (0-based) uses the curve
at (k + 1) / n. Therefore a warm-up from 0 has no step with factor 0, and there is no jump between phases.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass

from d9d_core.errors import JobError
from d9d_core.optimizer import LrSchedule

from d9d_optim.schedule.config import (
    ConstantConfig,
    CosineConfig,
    InverseSqrtConfig,
    LinearConfig,
    Phase,
    PiecewiseConfig,
    WarmupStableDecayConfig,
)
from d9d_optim.schedule.curves import Curve, curve_of

#: Default fraction of all steps in which the rate decays.
_DECAY_FRACTION = 0.1


def constant(config: ConstantConfig, total_steps: int) -> LrSchedule:  # noqa: ARG001 - the signature of LrScheduleSpec
    """Constant schedule: the factor is 1 in every step."""
    return lambda step: 1.0  # noqa: ARG005 - the same for all steps


def cosine(config: CosineConfig, total_steps: int) -> LrSchedule:
    """Linear warm-up, then cosine decay to ``min_factor`` in the last step.

    Loshchilov and Hutter, SGDR, equation 5, without restarts.

    Raises:
        JobError: the warm-up leaves no step for the decay.
    """
    return _warmed_up(config.warmup(total_steps), total_steps, Phase(to=config.min_factor, curve="cosine"))


def linear(config: LinearConfig, total_steps: int) -> LrSchedule:
    """Linear warm-up, then linear decay to ``min_factor`` in the last step.

    Raises:
        JobError: the warm-up leaves no step for the decay.
    """
    return _warmed_up(config.warmup(total_steps), total_steps, Phase(to=config.min_factor))


def warmup_stable_decay(config: WarmupStableDecayConfig, total_steps: int) -> LrSchedule:
    """Warm-up-stable-decay: linear warm-up, a constant phase at 1, a decay to ``min_factor`` in the last step.

    Hu et al. 2024, MiniCPM, section 4.2.

    Raises:
        JobError: warm-up and decay are longer than the run.
    """
    decay = config.decay_steps or max(1, round((config.decay_fraction or _DECAY_FRACTION) * total_steps))
    warmup = config.warmup(total_steps)
    if warmup + decay > total_steps:
        raise JobError(
            f"lr_schedule: the warm-up takes {warmup} steps and the decay {decay}, but the run has {total_steps}; "
            "shorten one of the two, or train longer"
        )
    bounds = (0, warmup, total_steps - decay, total_steps)
    phases = (Phase(to=1.0), Phase(to=1.0), Phase(to=config.min_factor, curve=config.curve))
    begins = (0.0, 1.0, 1.0)
    placed = zip(bounds, bounds[1:], begins, phases, strict=False)
    return Chain(tuple(place(first, end, begin, phase) for first, end, begin, phase in placed if end > first))


def inverse_sqrt(config: InverseSqrtConfig, total_steps: int) -> LrSchedule:
    """Linear warm-up for ``warmup_steps``, then ``sqrt(warmup_steps / step)``, where steps count from 1.

    Vaswani et al. 2017, Attention Is All You Need, equation 3, with the peak as base learning rate.

    Raises:
        JobError: the warm-up is longer than the run.
    """
    warmup = config.warmup_steps
    if warmup > total_steps:
        raise JobError(
            f"lr_schedule.warmup_steps is {warmup}, but the run has {total_steps} steps; use at most {total_steps}, or "
            "train longer"
        )
    return lambda step: min((step + 1) / warmup, math.sqrt(warmup / (step + 1)))


def _warmed_up(warmup_steps: int, total_steps: int, decay: Phase) -> Chain:
    """Make a chain of a linear warm-up from 0 to 1 and a decay over the remaining steps."""
    if warmup_steps >= total_steps:
        raise JobError(
            f"lr_schedule: the warm-up takes {warmup_steps} steps, but the run has {total_steps}; "
            f"use at most {total_steps - 1}, or warmup_fraction: 0.1, or train longer"
        )
    falls = place(warmup_steps, total_steps, 1.0, decay)
    if warmup_steps == 0:
        return Chain((falls,))
    return Chain((place(0, warmup_steps, 0.0, Phase(to=1.0)), falls))


@dataclass(frozen=True, slots=True)
class PlacedPhase:
    """Phase placed in the run: steps ``first`` to ``end`` (exclusive), from the factor ``begin`` along a curve."""

    first: int
    end: int
    begin: float
    to: float
    curve: Curve

    def at(self, step: int) -> float:
        """Factor in a step of the phase; in the last step exactly the factor ``to`` of the phase."""
        if step == self.end - 1:
            return self.to
        return self.curve(self.begin, self.to, (step - self.first + 1) / (self.end - self.first))


def place(first: int, end: int, begin: float, phase: Phase, where: str = "lr_schedule") -> PlacedPhase:
    """Place a phase in a run.

    Args:
        first: first step of the phase.
        end: last step plus 1.
        begin: factor at which the phase starts.
        phase: phase with the curve and the factor to reach.
        where: field of the job file, for error messages.

    Raises:
        JobError: a user's curve cannot be imported, or returns an invalid factor.
    """
    return PlacedPhase(first, end, begin, phase.to, curve_of(phase, begin, end - first, where))


@dataclass(frozen=True, slots=True)
class Chain:
    """Chain of phases without gaps: a schedule. After its end, the last factor applies."""

    pieces: tuple[PlacedPhase, ...]

    def __call__(self, step: int) -> float:
        """Factor in step ``step`` (0-based)."""
        step = min(step, self.pieces[-1].end - 1)
        return self.pieces[bisect.bisect_right(self.pieces, step, key=lambda piece: piece.end)].at(step)


def piecewise(config: PiecewiseConfig, total_steps: int) -> LrSchedule:
    """Piecewise schedule: places the phases in the run.

    Raises:
        JobError: the phases are longer or shorter than the run, a phase gets no step, or a user's curve cannot be
            imported or returns an invalid factor.
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
        pieces.append(place(first, end, begin, phase, where))
        first, begin = end, phase.to
    if first < total_steps:
        raise JobError(
            f"lr_schedule.phases end at step {first}, but the run has {total_steps} steps; "
            "let the last phase cover the rest by giving it neither steps nor until"
        )
    return Chain(tuple(pieces))


def _end(phase: Phase, first: int, total_steps: int) -> int:
    if phase.steps is not None:
        return first + phase.steps
    return total_steps if phase.until is None else round(phase.until * total_steps)
