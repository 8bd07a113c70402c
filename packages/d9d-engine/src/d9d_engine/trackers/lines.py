"""Files of one JSON object per line and logged step."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from d9d_weights.files.atomic import sync


class LineFile:
    """File of lines that is cut back to the resumed step.

    Args:
        path: where.
        resumed_step: lines of later steps, and a line torn by a crash, are cut off.
        lazy: make a new file with its first line only.
    """

    def __init__(self, path: Path, resumed_step: int, lazy: bool = False) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if resumed_step and path.exists():
            _cut(path, resumed_step)
        else:
            path.unlink(missing_ok=True)
        self._file = path.open("a", encoding="utf-8") if path.exists() or not lazy else None

    def append(self, line: Mapping[str, Any]) -> None:
        """Write one line; other processes see it at once."""
        if self._file is None:
            self._file = self.path.open("a", encoding="utf-8")
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Sync all lines to the disk."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Read the complete lines of a file, one by one; lines torn by a crash are left out."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for text in file:
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if isinstance(line, dict) and isinstance(line.get("step"), int):
                yield line


def _cut(path: Path, step: int) -> None:
    # Line by line and not as a whole: tables of a long run are large.
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in read_lines(path) if line["step"] <= step)
    sync(temporary)
    temporary.replace(path)
