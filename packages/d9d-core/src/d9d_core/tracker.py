"""Trackers: destinations of logged values; and the log through which tasks and subscribers write to them.

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

For further kinds of values, a run implements optional methods: ``write_tables`` (:class:`TakesTables`),
``write_histograms``, ``write_texts``, ``write_pictures``, ``write_files``. A run without such a method never receives
these values. Names with tags are :class:`SeriesName`, which is plain text for backends without tags.
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

#: Picture: uint8 [height, width, 3], red, green and blue channels.
Picture: TypeAlias = "Tensor"
#: Largest number of bytes of a name in UTF-8. Trackers name files by series, and file systems allow 255 bytes.
LONGEST_NAME = 200
_LONGEST_TAG = 60  # bytes of a tag's value, so that three tags fit into a name
_STEP = "step"  # column name that every tracker uses itself
_DIGEST = 8  # hexadecimal digits of the digest in a shortened name


class SeriesName(str):
    """Name of a series with tags; as text, the tags' values and the base name joined by ``/``: ``train/loss``.

    Attributes:
        base: name without tags: ``loss``.
        tags: tag -> value: ``{"stage": "train"}``.
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
    """Split the name of a series into its base name and its tags; most names have no tags."""
    return (name.base, name.tags) if isinstance(name, SeriesName) else (name, {})


def storable(name: str) -> str:
    """Name of a series with problematic characters escaped: names may contain labels of a dataset.

    Non-printing characters, path components without a name (``.``, ``..``, empty) and the name ``step`` are written
    with ``%`` and the code point in hexadecimal; a long name is shortened. Different names stay different. Tags are
    kept.
    """
    base, tags = split_tags(name)
    plain = {tag: shortened(_printable(str(value)), _LONGEST_TAG) for tag, value in tags.items()}
    room = LONGEST_NAME - sum(len(value.encode()) + 1 for value in plain.values())
    base = shortened(_printable(str(base)), max(room, _LONGEST_TAG))
    kept = SeriesName(base, plain) if isinstance(name, SeriesName) else base
    return f"{_code(_STEP[0])}{_STEP[1:]}" if kept == _STEP else kept


def shortened(text: str, most: int) -> str:
    """Text of at most ``most`` bytes in UTF-8; a cut text ends in a digest, so that different texts stay different."""
    content = text.encode()
    if len(content) <= most:
        return text
    digest = hashlib.sha256(content).hexdigest()[:_DIGEST]
    return f"{content[: most - _DIGEST - 1].decode(errors='ignore')}~{digest}"


def _printable(name: str) -> str:
    # A percent sign before a hexadecimal digit could be read as an escape, so it is escaped.
    coded = re.sub(r"%(?=[0-9A-F])", "%25", name)
    coded = "".join(letter if letter.isprintable() else _code(letter) for letter in coded)
    return "/".join(_part(part) for part in coded.split("/"))


def _part(part: str) -> str:
    if not part:
        return _code("/")
    dots = 1 if part == "." else 2 if part.startswith("..") else 0  # MLflow also refuses names such as ``..a``
    return "".join(map(_code, part[:dots])) + part[dots:]


def _code(letter: str) -> str:
    return f"%{ord(letter):02X}"


def flatten(values: Mapping[str, Json], prefix: str = "") -> dict[str, Json]:
    """Flatten nested values to names such as ``optimizer/lr``; lists of scalars stay whole."""
    flat: dict[str, Json] = {}
    for name, value in values.items():
        inner = value
        if isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
            inner = {str(index): item for index, item in enumerate(value)}
        flat |= flatten(inner, f"{prefix}{name}/") if isinstance(inner, Mapping) and inner else {prefix + name: value}
    return flat


@dataclass(frozen=True, slots=True)
class Histogram:
    """Histogram: counts of values in bins of equal width between two bounds.

    Attributes:
        counts: [bins], at least one.
        low: lower bound of the first bin; a number or a 0-d device tensor.
        high: upper bound of the last bin; a number or a 0-d device tensor.

    Raises:
        ValueError: ``counts`` is not a vector with at least one element.
    """

    counts: Tensor
    low: float | Tensor
    high: float | Tensor

    def __post_init__(self) -> None:
        if self.counts.ndim != 1 or not len(self.counts):
            shape = list(self.counts.shape)
            raise ValueError(f"counts of a histogram have shape {shape}; give one count per bin, at least one")


@dataclass(frozen=True, slots=True)
class RunInfo:
    """Facts about the run for trackers.

    Attributes:
        name: name of the run.
        directory: directory of the run.
        description: free text from the job file.
        config: resolved job.
        total_steps: optimizer steps of the whole run.
        resumed_step: number of steps done and saved, 0 for a new run. The tracker must remove entries of later steps; a
            backend that cannot remove entries keeps them and ignores entries that are written again.
        hparams: hyperparameters from the job file, possibly nested.
        tags: labels from the job file by which runs can be found.
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
    """Open run of a tracker. Failures of a tracker are reported once and never end the training.

    Each tracker has a thread that makes all calls to it, in order. Training waits for the tracker only before a
    checkpoint, at most ten seconds each for ``flush`` and ``state`` (thirty while the run opens), and at most thirty
    seconds at the end of the run. After a call of more than 0.2 s, training does not wait for this tracker until its
    calls are faster again. The checkpoint stores numbers, texts and histograms that a tracker has not flushed by then.
    A resumed run opens the tracker with an earlier ``resumed_step`` and writes them again.
    """

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write values after ``step`` steps (1-based), by series name."""
        ...

    def flush(self) -> bool | None:
        """Make everything written so far survive a crash; called before each checkpoint.

        Returns:
            ``False`` if flushing takes too long to wait for: the checkpoint stores the unconfirmed values, and the next
            checkpoint calls this method again. Any other result confirms the flush.
        """
        ...

    def state(self) -> State:
        """State from which :meth:`Tracker.open` continues this run, for example a run id."""
        ...

    def close(self, status: Literal["finished", "stopped", "failed"]) -> None:
        """End the run; ``status`` says whether it finished, stopped or failed."""
        ...


@runtime_checkable
class TakesTables(Protocol):
    """Tracker run that accepts tables."""

    def write_tables(self, step: int, tables: Mapping[str, Table]) -> None:
        """Write tables after ``step`` steps (1-based), by name; the tables are in host memory."""
        ...


@runtime_checkable
class TakesHistograms(Protocol):
    """Tracker run that accepts histograms."""

    def write_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Write histograms after ``step`` steps, by name: counts in host memory, bounds as numbers."""
        ...


@runtime_checkable
class TakesTexts(Protocol):
    """Tracker run that accepts texts."""

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Write texts after ``step`` steps, by name."""
        ...


@runtime_checkable
class TakesPictures(Protocol):
    """Tracker run that accepts pictures."""

    def write_pictures(self, step: int, pictures: Mapping[str, Picture]) -> None:
        """Write pictures after ``step`` steps, by name: uint8 [height, width, 3], red, green and blue, on the host."""
        ...


@runtime_checkable
class TakesFiles(Protocol):
    """Tracker run that accepts files."""

    def write_files(self, step: int, files: Mapping[str, Path]) -> None:
        """Store copies of files, by name, as they are after ``step`` steps."""
        ...


class Tracker(Protocol):
    """Destination of logged values."""

    def open(self, run: RunInfo, state: State | None) -> TrackerRun:
        """Start a run, or continue the run whose ``state`` a checkpoint saved."""
        ...


class RunLog(Protocol):
    """Log of a run, passed to all its trackers that support the kind of value.

    Values belong to the current step: the step whose forward and backward run now or, between two steps, the last step.
    Tensors may be on the device. A logged tensor is copied asynchronously, so the caller may change it at once; the
    copy reaches the trackers some steps later. Only the first rank has trackers; other ranks drop values, so reduce
    values over ranks before logging them.

    Log each name at most once per step for one kind of value and one set of tags; if a name is logged again, a tracker
    may keep either value. Trackers without tags join tags such as ``{"stage": "train"}`` to the name: ``train/loss``.
    """

    def scalar(self, name: str, value: float | Tensor, tags: Mapping[str, str] | None = None) -> None:
        """Log a number, or a tensor with one element.

        Raises:
            ValueError: the tensor has another number of elements.
        """
        ...

    def histogram(self, name: str, value: Histogram, tags: Mapping[str, str] | None = None) -> None:
        """Log a histogram."""
        ...

    def text(self, name: str, value: str, tags: Mapping[str, str] | None = None) -> None:
        """Log a text."""
        ...

    def picture(self, name: str, value: Picture, tags: Mapping[str, str] | None = None) -> None:
        """Log a picture: uint8 [height, width, 3], red, green and blue channels.

        Raises:
            ValueError: the picture has another shape or dtype.
        """
        ...

    def table(self, name: str, value: Table, tags: Mapping[str, str] | None = None) -> None:
        """Log a table."""
        ...

    def file(self, name: str, path: Path, tags: Mapping[str, str] | None = None) -> None:
        """Log a file. Trackers read it later, in their threads, so it must not change until the run ends.

        Raises:
            ValueError: the file does not exist.
        """
        ...


@runtime_checkable
class LogsValues(Protocol):
    """Task that logs its own values."""

    def take_log(self, log: RunLog) -> None:
        """Store the log for later use; called once, before training starts, on all ranks."""
        ...
