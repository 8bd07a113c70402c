"""Progress bars for terminals and notebooks."""

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

#: Characters of a line in a notebook's cell, and the escape sequence by which rich erases a line.
_WIDTH, _ERASE = 100, "\x1b[2K"


class CellStream:
    """Stream of a notebook's cell, which cannot erase a line: lines are overwritten with blanks instead.

    Args:
        stream: output stream of the cell.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write a text; returns the number of its characters."""
        self._stream.write(text.replace(_ERASE, " " * _WIDTH + "\r"))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def bar_of(columns: Sequence[ProgressColumn], shown: bool) -> Progress:
    """Progress bar on standard error if it is a terminal, or in the output of a notebook's cell; otherwise disabled.

    Args:
        columns: columns of the bar.
        shown: false disables the bar.
    """
    console = Console(stderr=True)
    if shown and console.is_jupyter:
        # An overwritten line in the cell's ordinary stream: it needs no widgets, and keeps other lines.
        stream = cast("IO[str]", CellStream(sys.stdout))
        line = Console(file=stream, force_jupyter=False, force_terminal=True, width=_WIDTH)
        return Progress(*columns, console=line)
    return Progress(
        *columns,
        console=console,
        disable=not (shown and sys.stderr.isatty()),
        redirect_stdout=sys.stdout.isatty(),  # output to a file must not be redirected to the terminal
    )


class _CountBar:
    """Progress bar with a count; see :func:`bar_of`. Any thread may advance it.

    Args:
        what: label of the bar.
        total: final count.
        shown: whether the bar is shown; false in all but one of several processes.
        columns: columns between the bar and the remaining time.
    """

    def __init__(self, what: str, total: int, shown: bool, columns: Sequence[ProgressColumn]) -> None:
        around = (TextColumn(what), BarColumn(), *columns, TextColumn("ETA"), TimeRemainingColumn())
        self._progress = bar_of(around, shown)
        self._task = self._progress.add_task(what, total=total)

    @property
    def done(self) -> int:
        """Count reached so far."""
        return int(self._progress.tasks[0].completed)

    def add(self, count: int) -> None:
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
