"""Sparklines: curves as lines of block characters, for a terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

_LEVELS = "▁▂▃▄▅▆▇█"
Points = Sequence[tuple[int, float]]


def sparklines(curves: Mapping[str, Points], width: int = 60) -> dict[str, str]:
    """Draw curves as lines of block characters with common axes: steps from left to right, values from low to high.

    Args:
        curves: name -> points (step, value).
        width: characters of the longest curve.
    """
    finite = {name: [(s, v) for s, v in points if math.isfinite(v)] for name, points in curves.items()}
    values = [value for points in finite.values() for _, value in points]
    if not values:
        return dict.fromkeys(curves, "")
    last = max(step for points in finite.values() for step, _ in points)
    low, high = min(values), max(values)
    return {name: _line(points, last, low, high, width) for name, points in finite.items()}


def _line(points: Points, last: int, low: float, high: float, width: int) -> str:
    cells: dict[int, list[float]] = {}
    for step, value in points:
        cells.setdefault(min(step * width // max(last, 1), width - 1), []).append(value)
    end = max(cells, default=-1)
    text, level = "", " "
    for cell in range(end + 1):
        if cell in cells:
            mean = sum(cells[cell]) / len(cells[cell])
            share = (mean - low) / (high - low) if high > low else 0.0
            level = _LEVELS[min(int(share * len(_LEVELS)), len(_LEVELS) - 1)]
        text += level
    return text
