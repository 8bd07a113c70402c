"""Tables of a metric as lines of JSON."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from d9d_core.metric import Table
from torch import Tensor

from d9d_engine.trackers.lines import read_lines


@dataclass(frozen=True, slots=True)
class TableHistory:
    """History of one table in a run.

    Attributes:
        mean: mean over the logged steps, per cell; NaN for cells that never had a value.
        steps: number of logged steps.
        last: table of the last logged step.
        last_step: last logged step.
    """

    mean: Table
    steps: int
    last: Table
    last_step: int


def table_line(step: int, name: str, table: Table) -> dict[str, Any]:
    """Serialise a table with its labels as a JSON object; non-finite values become null."""
    values = [[_short(value) for value in row] for row in table.values.tolist()]
    labels = {"row": table.row, "column": table.column, "unit": table.unit, "neutral": table.neutral}
    names = {"rows": list(table.rows)} if table.rows else {}
    return {"step": step, "table": name, **labels, **names, "values": values}


def read_tables(path: Path) -> dict[str, TableHistory]:
    """Read the histories of all tables in a file, line by line.

    The history of a table restarts where its shape or row names change.
    """
    sums: dict[str, tuple[Tensor, Tensor]] = {}  # sum and number of values of each cell
    found: dict[str, TableHistory] = {}
    for line in read_lines(path):
        name, table = line["table"], _table(line)
        values, there = table.values.nan_to_num(0.0), (~table.values.isnan()).double()
        steps = 1
        if name in found and _are_alike(found[name].last, table):
            values, there, steps = values + sums[name][0], there + sums[name][1], found[name].steps + 1
        sums[name] = values, there
        found[name] = TableHistory(table, steps, table, line["step"])
    means = {name: total / there for name, (total, there) in sums.items()}  # 0 / 0 gives NaN for cells without a value
    return {name: replace(of, mean=replace(of.last, values=means[name])) for name, of in found.items()}


def _short(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None


def _are_alike(before: Table, after: Table) -> bool:
    return before.values.shape == after.values.shape and before.rows == after.rows


def _table(line: dict[str, Any]) -> Table:
    values = [[math.nan if value is None else value for value in row] for row in line["values"]]
    labels = {key: line[key] for key in ("row", "column", "unit", "neutral")}
    return Table(torch.tensor(values, dtype=torch.float64), **labels, rows=tuple(line.get("rows", ())))
