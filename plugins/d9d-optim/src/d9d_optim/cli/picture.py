"""Plots of the learning rate over the steps of a run, as text and as SVG, without a plotting library."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import pairwise

_EIGHTHS = " ▁▂▃▄▅▆▇█"
#: Largest number of points of a line in a picture.
_POINTS = 2000


def text_plot(rates: Sequence[float], width: int = 72, height: int = 12) -> str:
    """Plot a learning-rate schedule as text: columns of block characters, each the highest rate of its steps.

    Args:
        rates: learning rate of each step.
        width: largest number of columns.
        height: number of lines of the columns; the axis takes two more.
    """
    columns = min(width, len(rates))
    bounds = [len(rates) * column // columns for column in range(columns + 1)]
    tops = [max(rates[first:end]) for first, end in pairwise(bounds)]
    top = max(tops) or 1.0
    levels = [round(value / top * height * 8) for value in tops]
    lines = []
    for line in range(height, 0, -1):
        label = f"{top * line / height:>9.3g}" if line in (height, (height + 1) // 2) else ""
        cells = "".join(_EIGHTHS[max(0, min(8, level - 8 * (line - 1)))] for level in levels)
        lines.append(f"{label:>9} │{cells.rstrip()}")
    last = f"{len(rates) - 1:,}"
    lines.append(f"{'0':>9} └{'─' * columns}")
    lines.append(f"{'':>9}  0{last:>{max(columns - 1, len(last) + 1)}}")
    return "\n".join(lines)


def svg_plot(rates: Sequence[float], title: str, width: int = 800, height: int = 400) -> str:
    """Plot a learning-rate schedule as SVG: a line with axes; the same rates give the same text.

    Args:
        rates: learning rate of each step.
        title: title above the plot.
        width: width of the picture.
        height: height of the picture.
    """
    left, right, top, bottom = 80, 20, 40, 50
    inner_width, inner_height = width - left - right, height - top - bottom
    highest = max(rates) or 1.0
    last = max(1, len(rates) - 1)

    def x(step: float) -> float:
        return left + inner_width * step / last

    def y(rate: float) -> float:
        return top + inner_height * (1 - rate / highest)

    stride = max(1, len(rates) // _POINTS)
    steps = sorted({*range(0, len(rates), stride), len(rates) - 1})
    line = " ".join(f"{x(step):.2f},{y(rates[step]):.2f}" for step in steps)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="12" role="img" aria-label="{escape(title)}">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{left}" y="24" font-size="15">{escape(title)}</text>',
    ]
    for part in range(5):
        rate, step = highest * part / 4, round(last * part / 4)
        parts += [
            f'<path d="M{left} {y(rate):.1f}H{width - right}" stroke="#ddd"/>',
            f'<text x="{left - 8}" y="{y(rate) + 4:.1f}" text-anchor="end">{rate:.3g}</text>',
            f'<text x="{x(step):.1f}" y="{height - bottom + 18}" text-anchor="middle">{step:,}</text>',
        ]
    parts += [
        f'<text x="{left + inner_width / 2:.0f}" y="{height - 10}" text-anchor="middle">step</text>',
        f'<text x="16" y="{top + inner_height / 2:.0f}" text-anchor="middle" '
        f'transform="rotate(-90 16 {top + inner_height / 2:.0f})">learning rate</text>',
        f'<polyline points="{line}" fill="none" stroke="#1f77b4" stroke-width="2"/>',
        "</svg>\n",
    ]
    return "\n".join(parts)
