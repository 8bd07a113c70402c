"""Writer ``csv``: CSV with a line of column names; each cell is a JSON value."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from d9d_core.inference import Columns

from acme_memory.config import CsvConfig


class CsvWriter:
    """Writer of CSV files."""

    suffix = ".csv"

    def __init__(self, config: CsvConfig) -> None:
        self._config = config

    def write(self, path: Path, rows: Columns) -> None:
        """Write one part: the names of the columns, then a line per row."""
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, delimiter=self._config.delimiter, lineterminator="\n")
            writer.writerow(rows)
            writer.writerows(map(_cell, row) for row in zip(*rows.values(), strict=True))

    def join(self, parts: Sequence[Path], path: Path) -> None:
        """Concatenate the parts, with the names of the columns only once."""
        with path.open("wb") as output:
            for number, part in enumerate(parts):
                content = part.read_bytes()
                # JSON has no line breaks inside of values, so that each row is one line.
                output.write(content if number == 0 else content.partition(b"\n")[2])


def _cell(value: Any) -> str:
    return json.dumps(value.tolist() if hasattr(value, "tolist") else value)
