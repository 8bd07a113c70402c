"""Progress bars on a terminal and in a notebook."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Self

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


def bar_of(columns: Sequence[ProgressColumn], shown: bool) -> Progress:
    """Bar on standard error if it is a terminal, in the output of a notebook's cell, or else nothing.

    Args:
        columns: of the bar.
        shown: false for none at all.
    """
    console = Console(stderr=True)
    if shown and console.is_jupyter:
        # A line that is written over, in the stream of all other lines: it needs no widgets, and no line is lost in it.
        line = Console(file=sys.stdout, force_jupyter=False, force_terminal=True)
        return Progress(*columns, console=line)
    return Progress(
        *columns,
        console=console,
        disable=not (shown and sys.stderr.isatty()),
        redirect_stdout=sys.stdout.isatty(),  # lines for a file must not end up in the terminal
    )


class ProgressBar:
    """Progress bar of steps, loss, and the time that remains; see :func:`bar_of`.

    Args:
        total: steps of the whole run.
        done: steps done before.
        shown: false for all but one of several processes.
    """

    def __init__(self, total: int, done: int, shown: bool = True) -> None:
        columns = (
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[shown]}"),
            TextColumn("ETA"),
            TimeRemainingColumn(),
        )
        self._progress = bar_of(columns, shown)
        self._task = self._progress.add_task("training", total=total, completed=done, shown="")
        self._lrs: dict[int, float] = {}
        self._speed = ""
        self.text = ""

    def issued(self, step: int, lr: float) -> None:
        """Step ``step`` (1-based) is on its way with this learning rate; its loss comes later."""
        self._lrs[step] = lr

    def update(self, step: int, loss: float) -> None:
        """Step ``step`` (1-based) is known to be done."""
        self.text = f"loss {loss:.3f}  lr {self._lrs.pop(step):.1e}{self._speed}"
        self._progress.update(self._task, completed=step, shown=self.text)

    def logged(self, tokens_per_second: float) -> None:
        """The speed that is shown until the next one comes."""
        self._speed = f"  {tokens_per_second:,.0f} tokens/s"

    def __enter__(self) -> ProgressBar:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()


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
