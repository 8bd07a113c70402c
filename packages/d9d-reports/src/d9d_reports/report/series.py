"""Charts of logged series: grouping of series, and thinning of points."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from d9d_reports.runs.record import RunRecord

Points = Sequence[tuple[int, float]]

#: Largest number of points of all curves on a page (about a megabyte), and of one curve.
_ALL_POINTS, _MOST = 60_000, 1500
#: Largest number of curves of each run in a chart, to keep them distinguishable, and of all curves on a page.
_CURVES, _ALL_CURVES = 16, 400
#: Groups of series whose charts come first, with the charts' titles; other charts follow in the order of names.
_FIRST: Mapping[str, str] = {
    "loss": "loss",
    "lr": "learning rate",
    "grad_norm": "norm of the gradients",
    "tokens_per_second": "throughput, tokens/s",
    "mfu": "model FLOPs utilisation (MFU)",
    "memory": "memory, GiB",
}
#: Colours with a contrast of at least 3 on a white and on a dark card.
_COLOURS = ("#3f7fd0", "#d9691f", "#3a9a5b", "#c2478f", "#8a63d2", "#a07d18", "#259393", "#d2504d")
#: Dash style in plotly -> name of the style in notes.
_DASHES = {"solid": "solid", "dash": "dashed", "dot": "dotted", "dashdot": "dashed and dotted"}
#: Series without a chart: they are proportional to the x axis.
_LEFT_OUT = frozenset({"step", "tokens"})


@dataclass
class Chart:
    """Chart of a page.

    Attributes:
        title: plain text above the chart.
        traces: curves or a heat map in plotly's format, with escaped texts, as plotly interprets tags in them.
        layout: settings that differ from the default layout.
        note: plain text below the chart.
        height: height in pixels.
    """

    title: str
    traces: list[dict[str, Any]]
    layout: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    height: int = 300


def plain(text: str) -> str:
    """Escape a text so that plotly shows it literally."""
    return escape(text, quote=False)


def thinned(points: Points, most: int) -> Points:
    """Thin a curve: keep the first and the last point, and the minimum and maximum of each interval between.

    Args:
        points: (step, value) pairs.
        most: largest number of points to keep; at least 4.
    """
    if len(points) <= most:
        return points
    inner = points[1:-1]
    stretches = (most - 2) // 2
    kept = [points[0]]
    for number in range(stretches):
        stretch = inner[number * len(inner) // stretches : (number + 1) * len(inner) // stretches]
        extremes = {stretch.index(of(stretch, key=lambda point: point[1])) for of in (min, max)} if stretch else set()
        kept += [stretch[index] for index in sorted(extremes)]
    return [*kept, points[-1]]


def series_charts(runs: Mapping[str, RunRecord]) -> list[Chart]:
    """Make the charts of all series of some runs; curves of the same series share a chart.

    Args:
        runs: shown name -> run.
    """
    groups: dict[str, list[tuple[str, str, Points]]] = {}
    for run, record in runs.items():
        for name, points in _curves(record).items():
            groups.setdefault(_group(name, record.job), []).append((run, name, points))
    count = sum(map(len, groups.values()))
    order = [*(name for name in _FIRST if name in groups), *sorted(groups.keys() - _FIRST.keys())]
    most = max(min(_ALL_POINTS // max(min(count, _ALL_CURVES), 1), _MOST), 40)
    charts, room = [], _ALL_CURVES
    for group in order:
        mine = groups[group]
        drawn = mine[: max(min(_CURVES * len(runs), room), 0)]
        room -= len(drawn)
        charts.append(_chart(group, list(runs), drawn, most, len(mine) - len(drawn)))
    return [chart for chart in charts if chart.traces]


def _curves(record: RunRecord) -> dict[str, list[tuple[int, float]]]:
    """Points of all series of a run, by name, in one pass over its lines."""
    found: dict[str, list[tuple[int, float]]] = {}
    for line in record.lines:
        for name, value in line.items():
            if name not in _LEFT_OUT and isinstance(value, int | float) and abs(value) <= sys.float_info.max:
                found.setdefault(name, []).append((line["step"], value))
    return found


def _group(name: str, job: Mapping[str, Any]) -> str:
    """Name of the chart that shows a series; the chart ``loss`` also shows ``eval/loss``."""
    parts = name.split("/")
    if parts[0] == "eval" and len(parts) > 1:
        section = job.get("evaluation")
        sets = section.get("sets") if isinstance(section, Mapping) else None
        parts = parts[2 if len(parts) > 2 and isinstance(sets, Mapping) and parts[1] in sets else 1 :]
    if parts[0] == "loss" and len(parts) > 1:
        return "parts of the loss"
    return parts[0]


def _chart(group: str, runs: list[str], curves: Sequence[tuple[str, str, Points]], most: int, left_out: int) -> Chart:
    names = list(dict.fromkeys(name for _, name, _ in curves))
    several = len(runs) > 1
    kinds, words = list(_DASHES), list(_DASHES.values())
    traces: list[dict[str, Any]] = []
    told: set[str] = set()  # runs that are in the legend
    for run, name, points in curves:
        colour, dash = (runs.index(run), names.index(name)) if several else (names.index(name), 0)
        shown = thinned(points, most)
        label = name if not several else run if len(names) == 1 else f"{run}: {name}"
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers" if len(shown) <= 60 else "lines",
                "name": plain(run if several else name),
                "legendgroup": plain(run if several else name),
                "showlegend": not several or run not in told,
                "x": [step for step, _ in shown],
                "y": [float(f"{value:.6g}") for _, value in shown],
                "line": {"color": _COLOURS[colour % len(_COLOURS)], "dash": kinds[dash % len(kinds)], "width": 1.6},
                "marker": {"size": 4},
                "hovertemplate": f"%{{y:.5g}} at step %{{x}}<extra>{plain(label)}</extra>",
            }
        )
        told.add(run)
    notes = [f"{left_out} further series of this group are in metrics.jsonl"] if left_out else []
    if several and len(names) > 1:
        notes.insert(0, ", ".join(f"{name} {words[at % len(words)]}" for at, name in enumerate(names)))
    note = "; ".join(notes)
    layout = {
        "xaxis": {"title": {"text": "step"}},
        "yaxis": ({"tickformat": ".1%"} if group == "mfu" else {}) | _around_one_value(traces),
        "showlegend": len(traces) > 1,
    }
    return Chart(_FIRST.get(group, group), traces, layout, note, height=380 if group == "loss" else 280)


def _around_one_value(traces: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Range of the y axis for a curve of equal values, such as a constant learning rate; plotly's would be -1 to 1."""
    values = {value for trace in traces for value in trace["y"]}
    if len(values) != 1 or not (value := values.pop()):
        return {}
    return {"range": sorted((0.0, 2 * value))}
