"""Progress bars on a terminal."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


class ProgressBar:
    """Progress bar of steps, loss, and the time that remains, on standard error if it is a terminal; else nothing.

    Args:
        total: steps of the whole run.
        done: steps done before.
        shown: false for all but one of several processes.
    """

    def __init__(self, total: int, done: int, shown: bool = True) -> None:
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[shown]}"),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=not (shown and sys.stderr.isatty()),
            redirect_stdout=sys.stdout.isatty(),  # lines for a file must not end up in the terminal
        )
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


class SampleBar:
    """Progress bar of samples, on standard error if it is a terminal; else nothing.

    Args:
        what: in a word.
        total: samples.
        shown: false for all but one of several processes.
    """

    def __init__(self, what: str, total: int, shown: bool = True) -> None:
        self._progress = Progress(
            TextColumn(what),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=not (shown and sys.stderr.isatty()),
        )
        self._task = self._progress.add_task(what, total=total)

    def add(self, count: int) -> None:
        """Add samples that are done."""
        self._progress.advance(self._task, count)

    def __enter__(self) -> SampleBar:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()


class ByteBar:
    """Progress bar of the bytes of a long transfer, on a terminal's standard error; else nothing. Any thread may add.

    Args:
        what: in a word.
        total: bytes.
        shown: false for all but one of several processes.
    """

    def __init__(self, what: str, total: int, shown: bool = True) -> None:
        self._progress = Progress(
            TextColumn(what),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=not (shown and sys.stderr.isatty()),
        )
        self._task = self._progress.add_task(what, total=total)

    @property
    def done(self) -> int:
        """Bytes done so far."""
        return int(self._progress.tasks[0].completed)

    def add(self, count: int) -> None:
        """Add bytes that are done."""
        self._progress.advance(self._task, count)

    def __enter__(self) -> ByteBar:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
