"""Logged values as lines of JSON, and the loss curve as a picture."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from d9d_core.config.trackers import JsonlConfig
from d9d_core.protocols import RunInfo, State
from d9d_core.state.files import write_text


class JsonlTracker:
    """Writes ``<run>/metrics.jsonl`` and ``<run>/loss.svg``."""

    def __init__(self, config: JsonlConfig) -> None:
        self._config = config

    def open(self, run: RunInfo, state: State | None) -> JsonlRun:  # noqa: ARG002 - the file itself is the state
        """Open the file; lines after the resumed step, and a line torn by a crash, are cut off."""
        path = run.directory / "metrics.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line in read_metrics(path) if line["step"] <= run.resumed_step] if run.resumed_step else []
        write_text(path, "".join(json.dumps(line) + "\n" for line in kept))
        return JsonlRun(path, run, self._config.picture)


class JsonlRun:
    """An open file."""

    def __init__(self, path: Path, run: RunInfo, picture: bool) -> None:
        self._path = path
        self._run = run
        self._picture = picture
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append one line; a value that is not finite becomes null, as JSON has no other word for it."""
        line = {"step": step} | {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def flush(self) -> None:
        """Have the disk take all lines."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def state(self) -> State:
        """Nothing: the file itself is cut back on resume."""
        return {}

    def close(self, status: Literal["finished", "stopped", "failed"]) -> None:  # noqa: ARG002
        """Close the file and draw the picture."""
        self._file.close()
        if self._picture:
            from d9d_core.trackers.picture import draw_loss

            draw_loss(read_metrics(self._path), self._run.directory / "loss.svg", self._run.name)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a metrics file; a last line torn by a crash is left out."""
    if not path.exists():
        return []
    lines = []
    for text in path.read_text("utf-8").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            lines.append(line)
    return lines
