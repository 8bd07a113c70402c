"""Progress bars of what is counted, on a terminal and in a notebook."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import TracebackType
from typing import IO, Any, Self, TextIO, cast

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

#: Characters of a line in a notebook's cell, and the sequence by which rich erases one.
_WIDTH, _ERASE = 100, "\x1b[2K"


class CellStream:
    """Stream of a notebook's cell, in which a line can be written over but not erased: blanks do that.

    Args:
        stream: of the cell.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write a text; returns how many of its characters were written."""
        self._stream.write(text.replace(_ERASE, " " * _WIDTH + "\r"))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def bar_of(columns: Sequence[ProgressColumn], shown: bool) -> Progress:
    """Progress bar on standard error if it is a terminal, in the output of a notebook's cell, or else nothing.

    Args:
        columns: of the bar.
        shown: false for none at all.
    """
    console = Console(stderr=True)
    if shown and console.is_jupyter:
        # A line that is written over, in the stream of all other lines: it needs no widgets, and no line is lost in it.
        stream = cast("IO[str]", CellStream(sys.stdout))
        line = Console(file=stream, force_jupyter=False, force_terminal=True, width=_WIDTH)
        return Progress(*columns, console=line)
    return Progress(
        *columns,
        console=console,
        disable=not (shown and sys.stderr.isatty()),
        redirect_stdout=sys.stdout.isatty(),  # lines for a file must not end up in the terminal
    )


class _CountBar:
    """Progress bar of things that are counted; see :func:`bar_of`. Any thread may add.

    Args:
        what: in a word.
        total: how many.
        shown: false for all but one of several processes.
        columns: what is shown between the bar and the time that remains.
    """

    def __init__(self, what: str, total: int, shown: bool, columns: Sequence[ProgressColumn]) -> None:
        around = (TextColumn(what), BarColumn(), *columns, TextColumn("ETA"), TimeRemainingColumn())
        self._progress = bar_of(around, shown)
        self._task = self._progress.add_task(what, total=total)

    @property
    def done(self) -> int:
        """Number of those that are done."""
        return int(self._progress.tasks[0].completed)

    def add(self, count: int) -> None:
        """Add some that are done."""
        self._progress.advance(self._task, count)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()


class SampleBar(_CountBar):
    """Progress bar of samples; see :class:`_CountBar`."""

    def __init__(self, what: str, total: int, shown: bool = True) -> None:
        super().__init__(what, total, shown, [MofNCompleteColumn()])


class ByteBar(_CountBar):
    """Progress bar of the bytes of a long transfer; see :class:`_CountBar`."""

    def __init__(self, what: str, total: int, shown: bool = True) -> None:
        super().__init__(what, total, shown, [DownloadColumn(binary_units=True), TransferSpeedColumn()])
