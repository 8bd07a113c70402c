"""Tracker that writes logged values as lines of JSON, pictures as PNG files, and drawings of curves."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from d9d_core.errors import PluginError
from d9d_core.metric import Table
from d9d_core.tensors import encode_png
from d9d_core.tracker import LONGEST_NAME, Histogram, RunInfo, shortened
from d9d_core.types import Json, State
from d9d_core.untrusted import visible
from torch import Tensor

from d9d_engine.trackers.config import JsonlConfig
from d9d_engine.trackers.lines import LineFile, read_lines
from d9d_engine.trackers.tables import read_tables, table_line


class JsonlTracker:
    """Tracker that writes ``<run>/metrics.jsonl`` and ``loss.svg``, and files for all other kinds of values."""

    def __init__(self, config: JsonlConfig) -> None:
        self._config = config

    def open(self, run: RunInfo, state: State | None) -> JsonlRun:
        """Open the files, and cut off lines after the checkpoint and a line torn by a crash."""
        return JsonlRun(run, self._config.picture, (state or {}).get("lengths"))


class JsonlRun:
    """Writes the files of one run, for the tracker ``jsonl``."""

    def __init__(self, run: RunInfo, picture: bool, lengths: Json = None) -> None:
        self._run = run
        self._picture = picture
        known: Mapping[str, Any] = lengths if isinstance(lengths, Mapping) else {}
        self._metrics, self._tables, self._histograms, self._texts = (
            LineFile(run.directory / name, run.resumed_step, lazy=name != "metrics.jsonl", length=known.get(name))
            for name in ("metrics.jsonl", "tables.jsonl", "histograms.jsonl", "texts.jsonl")
        )
        self._pictures = run.directory / "pictures"
        for path in self._pictures.glob("*/*.png"):
            if path.stem.isdecimal() and int(path.stem) > run.resumed_step:
                path.unlink()

    @property
    def _files(self) -> tuple[LineFile, ...]:
        return self._metrics, self._tables, self._histograms, self._texts

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append one line with the values of a step; NaN and infinity become null, as JSON cannot represent them."""
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._metrics.append({"step": step} | finite)

    def write_tables(self, step: int, tables: Mapping[str, Table]) -> None:
        """Append one line per table, values with four significant digits."""
        for name, table in tables.items():
            self._tables.append(table_line(step, name, table))

    def write_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Append one line per histogram."""
        for name, histogram in histograms.items():
            counts = [value if math.isfinite(value) else None for value in histogram.counts.tolist()]
            bounds = [value if math.isfinite(value) else None for value in map(float, (histogram.low, histogram.high))]
            line = {"step": step, "histogram": name, "low": bounds[0], "high": bounds[1], "counts": counts}
            self._histograms.append(line)

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Append one line per text."""
        for name, text in texts.items():
            self._texts.append({"step": step, "name": name, "text": text})

    def write_pictures(self, step: int, pictures: Mapping[str, Tensor]) -> None:
        """Write ``pictures/<name>/<step>.png`` for each, with ``%2F`` for a slash in the name."""
        for name, picture in pictures.items():
            path = self._pictures / _folder(name) / f"{step}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(encode_png(picture))

    def flush(self) -> None:
        """Sync all lines to the disk."""
        for file in self._files:
            file.sync()

    def state(self) -> State:
        """Lengths of the files, to tell apart entries of the same step logged before and after the checkpoint."""
        return {"lengths": {file.path.name: file.length for file in self._files}}

    def close(self, status: Literal["finished", "stopped", "failed"]) -> None:  # noqa: ARG002
        """Close the files, and draw the loss curve and the heat maps."""
        for file in self._files:
            file.close()
        if not self._picture:
            return
        try:
            self._draw(self._run.directory)
        except PluginError as error:  # pictures are optional: the values are already written
            with suppress(OSError):
                text = f"warning: {self._run.directory}: no loss.svg: {error}"
                print(visible(text), file=sys.stderr, flush=True)  # noqa: T201 - a tracker has no other way to report

    def _draw(self, directory: Path) -> None:
        from d9d_engine.trackers.picture import draw_loss
        from d9d_engine.trackers.picture_table import draw_table

        draw_loss(list(read_lines(self._metrics.path)), directory / "loss.svg", self._run.name)
        for name, history in read_tables(self._tables.path).items():
            draw_table(history, directory / f"{name.replace('/', '-')}.svg", f"{self._run.name}: {name}")


def _folder(name: str) -> str:
    """Name of the folder for a picture, different for each name. The hub encodes the names ``.`` and ``..``."""
    coded = re.sub(r"[^\w.-]", lambda found: f"%{ord(found[0]):02X}", name)
    return shortened(coded, LONGEST_NAME)
