"""JSON lines tracker: logged values as lines of JSON, and pictures of them."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal

from d9d_core.errors import PluginError
from d9d_core.protocols.metric import Table
from d9d_core.protocols.tracker import RunInfo
from d9d_core.types import State

from d9d_engine.trackers.config import JsonlConfig
from d9d_engine.trackers.lines import LineFile, read_lines
from d9d_engine.trackers.tables import read_tables, table_line


class JsonlTracker:
    """Tracker that writes ``<run>/metrics.jsonl`` and ``loss.svg``; of tables, ``tables.jsonl`` and a picture each."""

    def __init__(self, config: JsonlConfig) -> None:
        self._config = config

    def open(self, run: RunInfo, state: State | None) -> JsonlRun:  # noqa: ARG002 - the files themselves are the state
        """Open the files; lines after the resumed step, and a line torn by a crash, are cut off."""
        return JsonlRun(run, self._config.picture)


class JsonlRun:
    """Open run of the tracker ``jsonl``: its files."""

    def __init__(self, run: RunInfo, picture: bool) -> None:
        self._run = run
        self._picture = picture
        self._metrics = LineFile(run.directory / "metrics.jsonl", run.resumed_step)
        self._tables = LineFile(run.directory / "tables.jsonl", run.resumed_step, lazy=True)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append one line; a value that is not finite becomes null, as JSON has no other word for it."""
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._metrics.append({"step": step} | finite)

    def write_tables(self, step: int, tables: Mapping[str, Table]) -> None:
        """Append one line per table, values with four significant digits."""
        for name, table in tables.items():
            self._tables.append(table_line(step, name, table))

    def flush(self) -> None:
        """Sync all lines to the disk."""
        self._metrics.sync()
        self._tables.sync()

    def state(self) -> State:
        """No state: the files themselves are cut back on resume."""
        return {}

    def close(self, status: Literal["finished", "stopped", "failed"]) -> None:  # noqa: ARG002
        """Close the files and draw the pictures."""
        self._metrics.close()
        self._tables.close()
        if not self._picture:
            return
        try:
            self._draw(self._run.directory)
        except PluginError as error:  # pictures are an extra; the lines that they show are written
            with suppress(OSError):
                text = f"warning: {self._run.directory}: no loss.svg: {error}"
                print(text, file=sys.stderr, flush=True)  # noqa: T201 - a tracker's only way to say something

    def _draw(self, directory: Path) -> None:
        from d9d_engine.trackers.picture import draw_loss
        from d9d_engine.trackers.picture_table import draw_table

        draw_loss(list(read_lines(self._metrics.path)), directory / "loss.svg", self._run.name)
        for name, history in read_tables(self._tables.path).items():
            draw_table(history, directory / f"{name.replace('/', '-')}.svg", f"{self._run.name}: {name}")
