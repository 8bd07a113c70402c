"""Curves of learning-rate phases, from the factor at the start to the factor at the end, by name or import path.

A curve is a function of (begin, end, progress) with progress in (0, 1]; at progress 1 its value is ``end``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from d9d_core.containment import FOREIGN_FAILURES
from d9d_core.errors import JobError

from d9d_optim.imports import import_path
from d9d_optim.schedule.config import Phase

#: Type of curves: function of (begin, end, progress) that returns a factor on the learning rate.
Curve = Callable[[float, float, float], float]

#: Largest number of steps for which a user's curve is checked before the run.
_TRIALS = 10_000


def curve_of(phase: Phase, begin: float, steps: int, where: str) -> Curve:
    """Find the curve of a phase of a learning-rate schedule.

    Args:
        phase: phase with the name of the curve.
        begin: factor at which the phase starts.
        steps: length of the phase.
        where: field of the job file, for error messages.

    Raises:
        JobError: a user's curve cannot be imported, or returns an invalid factor.
    """
    power = 2.0 if phase.power is None else phase.power
    named: dict[str, Curve] = {
        "linear": linear,
        "cosine": cosine,
        "poly": partial(poly, power=power),
        "poly_late": partial(poly_late, power=power),
        "exponential": partial(exponential, floor=phase.floor or 0.0),
        "inverse_sqrt": inverse_sqrt,
    }
    if phase.curve in named:
        return named[phase.curve]
    field = f"{where}.curve"
    found: Curve = import_path(field, phase.curve)
    if not callable(found):
        raise JobError(f"{field}: {phase.curve} is a {type(found).__name__}; name a function of (begin, end, progress)")
    _try(found, phase, begin, steps, field)
    return found


def _try(curve: Curve, phase: Phase, begin: float, steps: int, field: str) -> None:
    """Raise if a user's curve returns an invalid factor, before the run instead of during it."""
    trials = min(steps, _TRIALS)
    for progress in ((index + 1) / trials for index in range(trials)):
        call = f"{phase.curve}({begin:g}, {phase.to:g}, {progress:g})"
        try:
            value: object = curve(begin, phase.to, progress)
        except FOREIGN_FAILURES as error:
            raise JobError(f"{field}: {call} raises {error!r}; it is called with (begin, end, progress)") from error
        if not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
            raise JobError(
                f"{field}: {call} returns {value!r}; a factor on the learning rate must be finite and not negative"
            )


def linear(begin: float, end: float, progress: float) -> float:
    """Linear curve from ``begin`` to ``end``."""
    return _mixed(begin, end, 1 - progress)


def cosine(begin: float, end: float, progress: float) -> float:
    """Half a cosine from ``begin`` to ``end``, which changes slowly at both ends."""
    return _mixed(begin, end, (1 + math.cos(math.pi * progress)) / 2)


def poly(begin: float, end: float, progress: float, power: float = 2.0) -> float:
    """Curve whose distance to ``end`` is ``(1 - progress) ** power`` times the initial distance; fast at first."""
    return _mixed(begin, end, math.pow(1 - progress, power))


def poly_late(begin: float, end: float, progress: float, power: float = 2.0) -> float:
    """Curve whose distance from ``begin`` is ``progress ** power`` times the whole distance; fast at the end."""
    return _mixed(begin, end, 1 - math.pow(progress, power))


def exponential(begin: float, end: float, progress: float, floor: float = 0.0) -> float:
    """Curve whose logarithm is linear; between its ends, a ``begin`` or ``end`` below ``floor`` counts as ``floor``."""
    if progress in (0.0, 1.0):
        return end if progress else begin
    return math.pow(max(begin, floor), 1 - progress) * math.pow(max(end, floor), progress)


def inverse_sqrt(begin: float, end: float, progress: float) -> float:
    """Curve ``c / sqrt(step + d)`` through ``begin`` and ``end``, whose inverse square is linear."""
    if progress in (0.0, 1.0):
        return end if progress else begin
    return 1 / math.sqrt((1 - progress) / begin**2 + progress / end**2)


def _mixed(begin: float, end: float, remaining: float) -> float:
    return end + (begin - end) * remaining
