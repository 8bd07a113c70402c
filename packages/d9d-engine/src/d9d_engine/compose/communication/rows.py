"""Rows of the table of collectives; collectives that differ only in layer indices share a row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from d9d_engine.compose.communication.placements import without_numbers
from d9d_engine.compose.communication.step import Entry


@dataclass
class Row:
    """Row of the table of collectives.

    Attributes:
        source: strategy or component that communicates.
        entry: first collective of the row.
        calls: number of calls of all collectives of the row, in ``entry.collective.every`` steps.
        what: purpose, with ``*`` for differing numbers.
    """

    source: str
    entry: Entry
    calls: int
    what: str

    def cells(self) -> Sequence[str]:
        """Cells of the row: kind, mesh dimensions, number of ranks, calls, bytes per call and purpose."""
        one = self.entry.collective
        size = "?" if one.bytes is None else f"{'~' if one.approximate else ''}{one.bytes:,}"
        calls = f"{'up to ' if one.at_most else ''}{self.calls}{f' / {one.every} steps' if one.every > 1 else ''}"
        return one.kind, one.group, str(len(one.ranks)), calls, size, self.what


def grouped(entries: Iterable[Entry]) -> Sequence[Row]:
    """Group collectives into rows by source, kind, ranks, bytes and purpose, in order of first occurrence."""
    rows: dict[tuple[object, ...], Row] = {}
    for entry in entries:
        one = entry.collective
        pattern = without_numbers(one.purpose)
        key = (entry.source, one.kind, one.ranks, one.bytes, one.approximate, one.at_most, one.every, pattern)
        row = rows.setdefault(key, Row(entry.source, entry, 0, one.purpose))
        row.calls += one.count
        row.what = row.what if row.what == one.purpose else pattern
    return list(rows.values())
