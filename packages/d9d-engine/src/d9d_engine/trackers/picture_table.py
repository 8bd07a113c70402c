"""Pictures of tables as heat maps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from d9d_core.metric import Table
from d9d_weights.files.atomic import write_text

from d9d_engine.figures import figure_svg, new_figure
from d9d_engine.trackers.tables import TableHistory

#: Size of a cell in inches; bounds of a panel's width and height in inches.
_CELL = 0.42
_WIDTH, _HEIGHT = (2.6, 7.0), (1.4, 6.0)
#: Largest number of cells drawn as vector paths; more cells are rasterized, to keep the file small.
_PATHS = 1500


def draw_table(history: TableHistory, path: Path, title: str) -> None:
    """Draw a table as SVG heat maps: its mean over the logged steps, and the last logged step.

    If the table has a neutral value, this value is white, lower values are blue and higher values red; missing values
    are grey.

    Raises:
        PluginError: matplotlib is not installed.
    """
    rows, columns = history.last.values.shape
    width, height = (min(max(cells * _CELL, low), high) for cells, (low, high) in ((columns, _WIDTH), (rows, _HEIGHT)))
    figure = new_figure(2 * width + 2.2, height + 1.3)
    left, right = figure.subplots(1, 2, sharey=True)
    colours = _colours(history)
    for axis, table, label in (
        (left, history.mean, f"mean of {history.steps} logged steps"),
        (right, history.last, f"step {history.last_step}"),
    ):
        mesh = axis.pcolormesh(table.values.numpy(), **colours, rasterized=rows * columns > _PATHS)
        axis.set_title(label, fontsize="medium")
        axis.set_xlabel(table.column)
        axis.set_facecolor("0.8")
        _label(axis.xaxis, _counted(columns), round(width / 0.4))
        _label(axis.yaxis, history.last.rows or _counted(rows), round(height / 0.3))
    left.set_ylabel(history.last.row)
    left.invert_yaxis()
    figure.colorbar(mesh, ax=[left, right], label=history.last.unit, pad=0.02)
    figure.suptitle(title)
    write_text(path, figure_svg(figure))


def _colours(history: TableHistory) -> dict[str, Any]:
    from matplotlib.colors import Normalize, TwoSlopeNorm

    low, high = _range(history.mean, history.last)
    neutral = history.last.neutral
    if neutral is None:
        return {"cmap": "viridis", "norm": Normalize(low, high)}
    # Show a range from zero to at least twice the neutral value, so that small deviations look small.
    span = max(high - neutral, neutral - low, abs(neutral)) or 1.0
    return {"cmap": "RdBu_r", "norm": TwoSlopeNorm(neutral, min(low, neutral - abs(neutral)), neutral + span)}


def _range(*tables: Table) -> tuple[float, float]:
    values = [value for table in tables for value in table.values.flatten().tolist() if value == value]  # noqa: PLR0124 - NaN
    return (min(values), max(values)) if values else (0.0, 1.0)


def _counted(cells: int) -> tuple[str, ...]:
    return tuple(str(cell) for cell in range(cells))


def _label(axis: Any, names: Sequence[str], room: int) -> None:
    """Label the cells along an axis at their centres: the first and every n-th cell, at most ``room`` labels."""
    cells = len(names)
    step = next(s for s in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, cells) if s >= cells or cells / s <= room)
    axis.set_ticks([cell + 0.5 for cell in range(0, cells, step)], list(names[::step]))
