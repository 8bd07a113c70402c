"""Tracker that writes event files for TensorBoard."""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from d9d_core.errors import PluginError
from d9d_core.metric import Table
from d9d_core.tensors import encode_png
from d9d_core.tracker import Histogram, RunInfo, flatten
from d9d_core.types import Json, State
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from torch import Tensor, linspace
from torch.utils.tensorboard import summary

from d9d_tensorboard.config import TensorBoardConfig


class TensorBoardTracker:
    """Tracker ``tensorboard``, which opens the event file of a run."""

    def __init__(self, config: TensorBoardConfig) -> None:
        self._config = config

    def open(self, run: RunInfo, state: State | None) -> TensorBoardRun:
        """Open a new event file, after removing the events after the checkpoint from this run's older files.

        The new file also tells readers that have already loaded the removed events to drop them.

        Raises:
            PluginError: the directory cannot be written.
        """
        directory = self._config.log_dir or run.directory / "tensorboard"
        purge_step = run.resumed_step + 1 if run.resumed_step else 0  # a new run keeps step 0, its summary
        try:
            directory.mkdir(parents=True, exist_ok=True)
            suffix = _suffix(run, self._config)
            most, kept, kinds = (state or {}).get("values"), 0, dict[str, str]()
            for path in sorted(directory.glob(f"events.out.tfevents.*{suffix}")):
                kept += _cut(path, purge_step, most - kept if isinstance(most, int) else None, kinds)
            writer = _EventFile(directory, suffix, self._config.flush_seconds)
        except OSError as error:
            raise PluginError(
                f"{directory} cannot be written ({error.strerror}); set log_dir of the tracker 'tensorboard' to a "
                "writable directory"
            ) from error
        start = SessionLog(status=SessionLog.START)
        for event in (Event(step=purge_step, file_version="brain.Event:2"), Event(step=purge_step, session_log=start)):
            writer.write(event)
        opened = TensorBoardRun(writer, kept, kinds)
        if not run.resumed_step:
            opened.summarise(run)
        return opened


class TensorBoardRun:
    """Open run of the tracker ``tensorboard``.

    Args:
        writer: writer of the event file.
        values: number of values in the run's older files.
        kinds: tag -> kind of its values in the run's older files.
    """

    def __init__(self, writer: _EventFile, values: int, kinds: Mapping[str, str]) -> None:
        self._writer = writer
        self._values = values
        self._kinds = dict(kinds)
        self._open = True

    def summarise(self, run: RunInfo) -> None:
        """Write name, description, tags and hyperparameters at step 0: as a text, and for the tab HPARAMS."""
        flat = flatten(run.hparams)
        lines = [f"# {run.name}", run.description, f"Tags: {', '.join(run.tags)}" if run.tags else ""]
        if flat:
            lines.append(_markdown(["name", "value"], [[name, _plain(value)] for name, value in flat.items()]))
            self._add(summary.hparams({name: _plain(value) for name, value in flat.items()}, {}), 0)
        job = json.dumps(run.config, indent=2)
        self.write_texts(0, {"run": "\n\n".join(line for line in lines if line), "job": f"```json\n{job}\n```"})
        self.flush()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write one point per series."""
        self._check()
        self._add([summary.scalar(self._tag(name, "number"), value) for name, value in values.items()], step)

    def write_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Write histograms from their counts; the moments in the file are computed from the centres of the bins."""
        self._check()
        parts = []
        for name, histogram in histograms.items():
            counts, low, high = histogram.counts.double(), float(histogram.low), float(histogram.high)
            edges = linspace(low, high, len(counts) + 1, dtype=counts.dtype)
            centres = (edges[:-1] + edges[1:]) / 2
            made = summary.histogram_raw(
                self._tag(name, "histogram"),
                min=low,
                max=high,
                num=counts.sum().item(),
                sum=(counts * centres).sum().item(),
                sum_squares=(counts * centres**2).sum().item(),
                bucket_limits=edges[1:].tolist(),
                bucket_counts=counts.tolist(),
            )
            parts.append(made)
        self._add(parts, step)

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Write texts, which TensorBoard shows as Markdown."""
        self._check()
        self._add([summary.text(self._tag(name, "text", "/text_summary"), text) for name, text in texts.items()], step)

    def write_pictures(self, step: int, pictures: Mapping[str, Tensor]) -> None:
        """Write pictures as PNG."""
        self._check()
        parts = []
        for name, picture in pictures.items():
            height, width, colours = picture.shape
            image = Summary.Image(
                height=height, width=width, colorspace=colours, encoded_image_string=encode_png(picture)
            )
            parts.append(Summary(value=[Summary.Value(tag=self._tag(name, "picture"), image=image)]))
        self._add(parts, step)

    def write_tables(self, step: int, tables: Mapping[str, Table]) -> None:
        """Write tables as texts, with four significant digits."""
        for name, table in tables.items():
            rows, columns = table.values.shape
            names = table.rows or tuple(map(str, range(rows)))
            head = [f"{table.row} / {table.column}", *map(str, range(columns))]
            cells = ([f"{value:.4g}" for value in row] for row in table.values.tolist())
            body = [[label, *row] for label, row in zip(names, cells, strict=True)]
            self.write_texts(step, {name: f"{table.unit}\n\n{_markdown(head, body)}"})

    def flush(self) -> None:
        """Flush the event file."""
        self._check()
        self._writer.flush()

    def state(self) -> State:
        """Number of values written so far; a step does not tell which of its values came after the checkpoint."""
        return {"values": self._values}

    def close(self, status: Literal["finished", "stopped", "failed"]) -> None:  # noqa: ARG002 - files have no status
        """Close the file."""
        if self._open:
            self._open = False
            self._writer.close()

    def _tag(self, name: str, kind: str, ending: str = "") -> str:
        """Tag of a series; gets a suffix if it has values of another kind, because readers expect one kind per tag."""
        if self._kinds.setdefault(f"{name}{ending}", kind) == kind:
            return str(name)
        self._kinds[f"{name} ({kind}){ending}"] = kind
        return f"{name} ({kind})"

    def _add(self, values: Sequence[Summary], step: int) -> None:
        """Write the values of one call; the caller has converted all of them, so a failed conversion writes none."""
        for value in values:
            self._values += 1
            self._writer.write(Event(step=step, summary=value))

    def _check(self) -> None:
        if not self._open:
            raise ValueError("the run is closed")


class _EventFile:
    """Event file whose name sorts after all others in its directory, even if the clock was set back.

    Readers order files by name.

    Args:
        directory: directory of the event files.
        suffix: suffix of the file name.
        flush_seconds: seconds since the last flush after which a write flushes the file.
    """

    def __init__(self, directory: Path, suffix: str, flush_seconds: float) -> None:
        names = [path.name for path in directory.glob("events.out.tfevents.*")]
        times = [int(found[1]) for name in names if (found := re.match(r"events\.out\.tfevents\.(\d{1,12})\.", name))]
        number = max(int(time.time()), max(times, default=0) + 1)
        name = f"events.out.tfevents.{number:010d}.{socket.gethostname()}.{os.getpid()}{suffix}"
        self._writer = RecordWriter((directory / name).open("xb"))
        self._flush_seconds = flush_seconds
        self._flushed = time.monotonic()

    def write(self, event: Event) -> None:
        """Write an event with the current time."""
        event.wall_time = time.time()
        self._writer.write(event.SerializeToString())
        if time.monotonic() - self._flushed >= self._flush_seconds:
            self.flush()

    def flush(self) -> None:
        """Flush the event file."""
        self._writer.flush()
        self._flushed = time.monotonic()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


def _suffix(run: RunInfo, config: TensorBoardConfig) -> str:
    """Suffix of this run's files, which distinguishes them from files of other runs in a configured directory.

    It comes from the run's directory, because names of runs may be equal. In the default directory, which moves with
    the run, it is constant.
    """
    if config.log_dir is None:
        return ".d9d"
    return f".d9d-{hashlib.sha256(str(run.directory.absolute()).encode()).hexdigest()[:16]}"


def _cut(path: Path, step: int, most: int | None, kinds: dict[str, str]) -> int:
    """Remove the events of ``step`` and of later steps; readers would drop repeated points, but not texts.

    If ``most`` is given, keep at most that many values: further values of the previous step were written after the
    checkpoint. Adds the kind of each remaining value to ``kinds``, by tag.

    Returns:
        Number of values that remain.
    """
    events = list(RawEventFileLoader(str(path)).Load())
    kept, values = list[bytes](), 0
    for content in events:
        event = Event.FromString(content)
        is_value = event.HasField("summary")
        if event.step < step and not (is_value and most is not None and values >= most and event.step == step - 1):
            kept.append(content)
            values += is_value
            kinds.update(_kinds(event))
    if not step:
        path.unlink()
    elif len(kept) < len(events):
        rest = path.with_name(f".{path.name}.rest")
        with rest.open("wb") as file:
            writer = RecordWriter(file)
            for content in kept:
                writer.write(content)
        rest.replace(path)
    return values


def _kinds(event: Event) -> Iterator[tuple[str, str]]:
    kinds = {"simple_value": "number", "histo": "histogram", "tensor": "text", "image": "picture"}
    for value in event.summary.value if event.HasField("summary") else ():
        yield value.tag, kinds.get(str(value.WhichOneof("value")), "")


def _plain(value: Json) -> str | float | bool:
    return value if isinstance(value, str | int | float | bool) else json.dumps(value)


def _markdown(head: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
