"""Monotone curves between two values."""

from __future__ import annotations

import math
from typing import Literal, assert_never

CurveName = Literal["linear", "cosine", "poly", "exponential"]


def interpolate(curve: CurveName, begin: float, end: float, progress: float, power: float = 2.0) -> float:
    """The value at ``progress``, from ``begin`` (0) to ``end`` (1); both ends are exact.

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
