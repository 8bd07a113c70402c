"""Charts of logged tables, such as the load of each expert."""

from __future__ import annotations

import math
from pathlib import Path

from d9d_core.metric import Table
from d9d_engine.trackers.tables import TableHistory, read_tables

from d9d_reports.report.series import Chart, plain

#: Largest number of table cells on a page; a cell takes about six bytes.
_CELLS = 60_000
#: Colours of values below (blue), at and above (red) the neutral value.
_DIVERGING = [[0, "#2f6fb7"], [0.5, "#f4f4f4"], [1, "#c8402f"]]


def table_charts(runs: dict[str, Path]) -> list[Chart]:
    """Make two heat maps of each table of some runs: its mean over the logged steps, and the last logged step.

    Args:
        runs: shown name -> directory of the run.
    """
    charts, room = [], _CELLS
    for run, directory in runs.items():
        path = directory / "tables.jsonl"
        try:
            found = read_tables(path)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            charts.append(Chart("Tables", [], note=f"{path} is damaged: {type(error).__name__}: {error}"))
            continue
        for name, history in found.items():
            title = name if len(runs) == 1 else f"{run}: {name}"
            if (cells := 2 * history.last.values.numel()) > room:
                charts.append(Chart(title, [], note=f"too large for a page: {cells // 2:,} cells; see tables.jsonl"))
                continue
            room -= cells
            mean = f"{title}, mean of {history.steps} logged steps"
            charts += [_heat_map(history, history.mean, mean)]
            charts += [_heat_map(history, history.last, f"{title}, step {history.last_step}")]
    return charts


def _heat_map(history: TableHistory, table: Table, title: str) -> Chart:
    rows, columns = table.values.shape
    names = [plain(name) for name in table.rows] or [str(row) for row in range(rows)]
    found = [
        value
        for shown in (history.mean, history.last)
        for value in shown.values.flatten().tolist()
        if math.isfinite(value)
    ]
    low, high = min(found, default=0.0), max(found, default=1.0)
    colours: dict[str, object] = {"zmin": low, "zmax": high, "colorscale": "Viridis"}
    if (neutral := table.neutral) is not None:
        # Show a range from zero to at least twice the neutral value, so that small deviations look small.
        span = max(high - neutral, neutral - low, abs(neutral)) or 1.0
        colours = {"zmin": neutral - span, "zmax": neutral + span, "colorscale": _DIVERGING}
    row, column, unit = map(plain, (table.row, table.column, table.unit))
    trace = {
        "type": "heatmap",
        "z": [[float(f"{value:.4g}") if math.isfinite(value) else None for value in line] for line in _lines(table)],
        "y": names,
        "colorbar": {"title": {"text": unit, "side": "right"}, "thickness": 12},
        "hovertemplate": f"{row} %{{y}}, {column} %{{x}}: %{{z}}<extra></extra>",
        "xgap": 1 if columns <= 64 else 0,
        "ygap": 1 if rows <= 64 else 0,
        **colours,
    }
    axes = {
        "xaxis": {"title": {"text": column}},
        # Use a category axis, so that numeric names are not interpolated.
        "yaxis": {"title": {"text": row}, "autorange": "reversed", "type": "category"},
    }
    return Chart(title, [trace], axes, height=min(max(140 + 22 * rows, 220), 640))


def _lines(table: Table) -> list[list[float]]:
    lines: list[list[float]] = table.values.tolist()
    return lines
