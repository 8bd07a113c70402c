"""Trackers: destinations of logged values; and the log by which tasks and subscribers reach them.

Start here: :class:`Tracker` opens a :class:`TrackerRun`, which takes numbers by series name::

    class Lines:
        def __init__(self, config): ...
        def open(self, run, state): return LinesOf(run.directory / "lines.txt")

    class LinesOf:
        def __init__(self, path): self.file = path.open("a")
        def write(self, step, values): print(step, dict(values), file=self.file)
        def flush(self): self.file.flush()
        def state(self): return {}
        def close(self, status): self.file.close()

For each further kind of values that a run has a place for, it has one method more: ``write_tables``
(:class:`TakesTables`), ``write_histograms``, ``write_texts``, ``write_pictures``, ``write_files``. A run without one
never sees such values. Names with tags are :class:`SeriesName`, which is plain text for backends that know no tags.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, runtime_checkable

from d9d_core.metric import Table
from d9d_core.types import Json, State

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "Histogram", "LogsValues", "Picture", "RunInfo", "RunLog", "SeriesName", "TakesFiles", "TakesHistograms",
    "TakesPictures", "TakesTables", "TakesTexts", "Tracker", "TrackerRun", "flatten", "shortened", "split_tags",
    "storable",
]  # fmt: skip

#: Picture: uint8 [height, width, 3], red, green and blue.
Picture: TypeAlias = "Tensor"
#: Bytes of the longest name in UTF-8. Trackers name files by series, and file systems take 255.
LONGEST_NAME = 200
_LONGEST_TAG = 60  # of three tags
_STEP = "step"  # the column that every tracker has already
_DIGEST = 8  # hexadecimal digits


class SeriesName(str):
    """Name of a series with tags; as text, the values of the tags and the name joined by ``/``: ``train/loss``.

    Attributes:
        base: the name without tags: ``loss``.
        tags: values by tag: ``{"stage": "train"}``.
    """

    __slots__ = ("base", "tags")
    base: str
    tags: Mapping[str, str]

    def __new__(cls, base: str, tags: Mapping[str, str] | None = None) -> SeriesName:
        """Join the tags and the name."""
        tags = dict(tags or {})
        name = super().__new__(cls, "/".join([*tags.values(), base]))
        name.base, name.tags = str(base), tags
        return name


def split_tags(name: str) -> tuple[str, Mapping[str, str]]:
    """Split the name of a series into the name without tags, and its tags, of which most have none."""
    return (name.base, name.tags) if isinstance(name, SeriesName) else (name, {})


def storable(name: str) -> str:
    """Name of a series as trackers get it; labels of a corpus may have made it from anything.

    Characters that do not print, parts that are no names in a path (``.``, ``..``, nothing) and the name ``step`` are
    written with ``%`` and the code point in hexadecimal; a long name is shortened. Two names stay two names. Tags are
    kept.
    """
    base, tags = split_tags(name)
    plain = {tag: shortened(_printable(str(value)), _LONGEST_TAG) for tag, value in tags.items()}
    room = LONGEST_NAME - sum(len(value.encode()) + 1 for value in plain.values())
    base = shortened(_printable(str(base)), max(room, _LONGEST_TAG))
    kept = SeriesName(base, plain) if isinstance(name, SeriesName) else base
    return f"{_code(_STEP[0])}{_STEP[1:]}" if kept == _STEP else kept


def shortened(text: str, most: int) -> str:
    """Text of at most ``most`` bytes in UTF-8; one that is cut ends in a digest, so that two texts stay two texts."""
    content = text.encode()
    if len(content) <= most:
        return text
    digest = hashlib.sha256(content).hexdigest()[:_DIGEST]
    return f"{content[: most - _DIGEST - 1].decode(errors='ignore')}~{digest}"


def _printable(name: str) -> str:
    # A percent sign that could be read as one of these codes becomes a code itself.
    coded = re.sub(r"%(?=[0-9A-F])", "%25", name)
    coded = "".join(letter if letter.isprintable() else _code(letter) for letter in coded)
    return "/".join(_part(part) for part in coded.split("/"))


def _part(part: str) -> str:
    if not part:
        return _code("/")
    dots = 1 if part == "." else 2 if part.startswith("..") else 0  # MLflow takes ``..a`` for a way out, too
    return "".join(map(_code, part[:dots])) + part[dots:]


def _code(letter: str) -> str:
    return f"%{ord(letter):02X}"


def flatten(values: Mapping[str, Json], prefix: str = "") -> dict[str, Json]:
    """Flatten nested values to names such as ``optimizer/lr``; lists of plain values stay whole."""
    flat: dict[str, Json] = {}
    for name, value in values.items():
        inner = value
        if isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
            inner = {str(index): item for index, item in enumerate(value)}
        flat |= flatten(inner, f"{prefix}{name}/") if isinstance(inner, Mapping) and inner else {prefix + name: value}
    return flat


@dataclass(frozen=True, slots=True)
class Histogram:
    """Histogram: how many values lie in each of the bins of equal width between two bounds.

    Attributes:
        counts: [bins], at least one.
        low: lower bound of the first bin; a number, or a 0-d tensor where the device knows it.
        high: upper bound of the last bin, alike.

    Raises:
        ValueError: the counts are no vector.
    """

    counts: Tensor
    low: float | Tensor
    high: float | Tensor

    def __post_init__(self) -> None:
        if self.counts.ndim != 1 or not len(self.counts):
            shape = list(self.counts.shape)
            raise ValueError(f"counts of a histogram have shape {shape}; give one count for each bin, at least one")


@dataclass(frozen=True, slots=True)
class RunInfo:
    """Facts about the run for trackers.

    Attributes:
        name: the run's name.
        directory: the run's directory.
        description: free text from the job file.
        config: the resolved job.
        total_steps: optimizer steps of the whole run.
        resumed_step: steps already done and saved, 0 for a new run. Entries of later steps must disappear; a backend
            that removes nothing keeps those it has and passes over what is written again.
        hparams: hyperparameters from the job file, which may be nested.
        tags: words from the job file by which runs are found.
    """

    name: str
    directory: Path
    description: str
    config: State
    total_steps: int
    resumed_step: int
    hparams: State = field(default_factory=dict[str, Json])
    tags: tuple[str, ...] = ()


class TrackerRun(Protocol):
    """Open run of a tracker. A failing tracker is reported once and never ends the training.

    Each tracker has a thread, in which all calls to it are made, in order. Training waits for them only before a
    checkpoint, at most ten seconds each for ``flush`` and ``state`` (thirty while the run opens), and at most thirty at
    the end of the run. One that takes more than two seconds gets a fifth of one until it is quicker. What a tracker has
    not flushed by then, the checkpoint keeps: numbers, texts and histograms. A resumed run then opens it with an
    earlier ``resumed_step``, and writes them again.
    """

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write values after ``step`` steps (1-based), by series name."""
        ...

    def flush(self) -> bool | None:
        """Make everything written so far survive a crash; called before each checkpoint.

        Returns:
            ``False`` if that takes longer than is worth waiting for: the checkpoint keeps what no flush has confirmed,
            and the next one flushes again. Anything else confirms it.
        """
        ...

    def state(self) -> State:
        """State from which :meth:`Tracker.open` continues this run, such as a run id."""
        ...

    def close(self, status: Literal["finished", "stopped", "failed"]) -> None:
        """End the run."""
        ...


@runtime_checkable
class TakesTables(Protocol):
    """Tracker run that takes tables too. One that does not never sees any."""

    def write_tables(self, step: int, tables: Mapping[str, Table]) -> None:
        """Write tables after ``step`` steps (1-based), by name; they are in the host's memory."""
        ...


@runtime_checkable
class TakesHistograms(Protocol):
    """Tracker run that takes histograms too. One that does not never sees any."""

    def write_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Write histograms after ``step`` steps, by name: counts in the host's memory, bounds as numbers."""
        ...


@runtime_checkable
class TakesTexts(Protocol):
    """Tracker run that takes texts too. One that does not never sees any."""

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Write texts after ``step`` steps, by name."""
        ...


@runtime_checkable
class TakesPictures(Protocol):
    """Tracker run that takes pictures too. One that does not never sees any."""

    def write_pictures(self, step: int, pictures: Mapping[str, Picture]) -> None:
        """Write pictures after ``step`` steps, by name: uint8 [height, width, 3], red, green and blue, on the host."""
        ...


@runtime_checkable
class TakesFiles(Protocol):
    """Tracker run that takes files too. One that does not never sees any."""

    def write_files(self, step: int, files: Mapping[str, Path]) -> None:
        """Keep copies of files as they are after ``step`` steps, by name."""
        ...


class Tracker(Protocol):
    """Destination of logged values."""

    def open(self, run: RunInfo, state: State | None) -> TrackerRun:
        """Start a run, or continue the one whose ``state`` a checkpoint kept."""
        ...


class RunLog(Protocol):
    """Log of a run, which all its trackers get, each as far as it takes such values.

    Values belong to the present step: the one whose forward and backward run now, or the last one between two steps.
    Tensors may be on the device. They are copied when they are logged, and reach the trackers some steps later, when
    the copy is done; nothing waits for the device, and the tensors may change at once. Nothing is kept on ranks other
    than the first, which has the trackers: what shall be about all ranks is to be reduced before.

    A name is taken once in a step for each kind and tags; of several values, trackers may keep any. With tags, such as
    ``{"stage": "train"}``, trackers that know none join them to the name: ``train/loss``.
    """

    def scalar(self, name: str, value: float | Tensor, tags: Mapping[str, str] | None = None) -> None:
        """Log a number, or a tensor with one element.

        Raises:
            ValueError: it has more than one element.
        """
        ...

    def histogram(self, name: str, value: Histogram, tags: Mapping[str, str] | None = None) -> None:
        """Log a histogram."""
        ...

    def text(self, name: str, value: str, tags: Mapping[str, str] | None = None) -> None:
        """Log a text."""
        ...

    def picture(self, name: str, value: Picture, tags: Mapping[str, str] | None = None) -> None:
        """Log a picture: uint8 [height, width, 3], red, green and blue.

        Raises:
            ValueError: it has another shape or dtype.
        """
        ...

    def table(self, name: str, value: Table, tags: Mapping[str, str] | None = None) -> None:
        """Log a table."""
        ...

    def file(self, name: str, path: Path, tags: Mapping[str, str] | None = None) -> None:
        """Log a file. Trackers read it later, in threads of theirs: it stays as it is until the run ends.

        Raises:
            ValueError: there is no such file.
        """
        ...


@runtime_checkable
class LogsValues(Protocol):
    """Task that logs values of its own."""

    def take_log(self, log: RunLog) -> None:
        """Keep the log for later; called once, before training starts, on all ranks."""
        ...
