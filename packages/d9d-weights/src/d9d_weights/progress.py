"""Progress bars for terminals and notebooks, and progress lines for logs.

A bar is redrawn only if its contents changed. Operations of less than a second show nothing. Where no bar can be drawn,
such as in a log, a line is printed every ten seconds.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import IO, Any, Self, TextIO, cast

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

#: Seconds after which an operation is shown, so that short ones do not flicker.
PATIENCE = 1.0
#: Seconds between two lines of a log about the same operation.
PERIOD = 10.0
#: Redraws per second on a terminal, and in a notebook, which stores every frame in its file.
_PER_SECOND, _PER_SECOND_IN_NOTEBOOK = 4, 1
#: Units of byte counts, largest first.
_UNITS = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
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


def amount(done: float, total: float) -> str:
    """Text of a number of bytes out of a total, such as ``3.2 of 15.0 GiB``, in the unit of the total."""
    unit, size = _unit(total)
    return f"{done / size:.1f} of {total / size:.1f} {unit}" if unit != "B" else f"{done:.0f} of {total:.0f} B"


def size_text(count: float) -> str:
    """Text of a number of bytes, such as ``1.02 GiB``."""
    unit, size = _unit(count)
    return f"{count / size:,.2f} {unit}" if unit != "B" else f"{count:.0f} B"


def _unit(count: float) -> tuple[str, int]:
    return next((entry for entry in _UNITS if count >= entry[1]), ("B", 1))


class EtaColumn(ProgressColumn):
    """Column with the remaining time, rounded up to seconds; empty without an estimate, and at the end."""

    def render(self, task: Task) -> Text:
        """Render the remaining time of a task, such as ``ETA 0:01:30``."""
        seconds = task.time_remaining
        if task.finished or seconds is None:
            return Text("")
        minutes, rest = divmod(int(seconds), 60)
        return Text(f"ETA {minutes // 60}:{minutes % 60:02}:{rest:02}", style="progress.remaining")


class BytesColumn(ProgressColumn):
    """Column with the number of bytes, their total and the speed, such as ``3.2 of 15.0 GiB  1.1 GiB/s``."""

    def render(self, task: Task) -> Text:
        """Render the bytes of a task."""
        text = amount(task.completed, task.total or 0)
        if (speed := task.finished_speed or task.speed) is not None:
            unit, size = _unit(speed)
            text += f"  {speed / size:.1f} {unit}/s"
        return Text(text, style="progress.download")


class _ChangingLive(Live):
    """Live display that draws a frame only if its contents differ from the last drawn contents.

    Args:
        contents: function that returns the contents.
        settings: settings of the base class.
    """

    def __init__(self, contents: Callable[[], Hashable], **settings: Any) -> None:
        super().__init__(**settings)
        self._contents = contents
        self._drawn: Hashable = None

    def refresh(self) -> None:
        """Draw a frame if the contents changed, or if the display ends."""
        contents = self._contents()
        if self.is_started and contents == self._drawn:
            return
        self._drawn = contents
        super().refresh()


class ChangingProgress(Progress):
    """Progress bar that is redrawn only if its contents changed. Its columns must not depend on the time.

    Args:
        columns: columns of the bar.
        redirect_stdout: whether lines on standard output are printed above the bar.
        transient: remove the bar at its end.
        refresh_per_second: redraws per second at most.
        settings: further settings of the base class.
    """

    def __init__(
        self,
        *columns: ProgressColumn,
        redirect_stdout: bool = True,
        transient: bool = False,
        refresh_per_second: float = _PER_SECOND,
        **settings: Any,
    ) -> None:
        super().__init__(*columns, **settings)
        self.live = _ChangingLive(
            self.contents,
            console=self.console,
            get_renderable=self.get_renderable,
            redirect_stdout=redirect_stdout,
            transient=transient,
            refresh_per_second=refresh_per_second,
        )

    def contents(self) -> Hashable:
        """Contents of the bar: equal contents give equal frames."""
        return tuple((one.description, one.completed, one.total, *one.fields.values()) for one in self.tasks)


def bar_of(columns: Sequence[ProgressColumn], shown: bool, transient: bool = False) -> ChangingProgress:
    """Progress bar on standard error if it is a terminal, or in the output of a notebook's cell; otherwise disabled.

    Args:
        columns: columns of the bar.
        shown: false disables the bar.
        transient: remove the bar from the terminal at its end.
    """
    console = Console(stderr=True)
    if shown and console.is_jupyter:
        # The bar overwrites one line of the cell's ordinary stream: this needs no widgets, and other lines stay.
        stream = cast("IO[str]", CellStream(sys.stdout))
        line = Console(file=stream, force_jupyter=False, force_terminal=True, width=_WIDTH)
        return ChangingProgress(*columns, console=line, refresh_per_second=_PER_SECOND_IN_NOTEBOOK)
    return ChangingProgress(
        *columns,
        console=console,
        disable=not (shown and sys.stderr.isatty()),
        transient=transient,
        redirect_stdout=sys.stdout.isatty(),  # output to a file must not be redirected to the terminal
    )


class LogLines:
    """Lines of a log about one long operation, at most one in ten seconds. Any thread may call :meth:`say`.

    Args:
        clock: function that returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._next = clock() + PERIOD

    def say(self, text: Callable[[], str]) -> None:
        """Print a line on standard error, unless the last line or the beginning is less than ten seconds ago."""
        with self._lock:
            if self._clock() < self._next:
                return
            self._next = self._clock() + PERIOD
        with suppress(OSError):  # a full disk or a closed pipe must not end the operation
            print(text(), file=sys.stderr, flush=True)  # noqa: T201 - console output is the purpose


class _LateProgress(Progress):
    """Progress display that stays blank in its first second."""

    def get_renderables(self) -> Iterable[RenderableType]:
        """Yield the display, or an empty line in the first second."""
        if any((task.elapsed or 0.0) >= PATIENCE for task in self.tasks):
            yield from super().get_renderables()
        else:
            yield Text("")


@contextmanager
def waiting(what: str, shown: bool = True) -> Iterator[None]:
    """Show a line with the seconds that the block has taken so far, on a terminal, after the first second.

    Args:
        what: text of the line.
        shown: whether the line is shown; false in all but one of several processes.
    """
    console = Console(stderr=True)
    if not shown or console.is_jupyter or not sys.stderr.isatty():
        yield
        return
    columns = (SpinnerColumn(), TextColumn(what), TimeElapsedColumn())
    own_lines = sys.stdout.isatty()  # output to a file must not be redirected to the terminal
    with _LateProgress(*columns, console=console, transient=True, redirect_stdout=own_lines) as progress:
        progress.add_task(what, total=None)
        yield


class _CountBar:
    """Progress bar with a count, see :func:`bar_of`; without a terminal, lines. Any thread may advance it.

    Args:
        what: label of the bar.
        total: final count.
        shown: whether the bar is shown; false in all but one of several processes.
        columns: columns between the bar and the remaining time.
        text: function of count and total that returns their text in log lines.
        transient: remove the bar from the terminal at its end.
    """

    def __init__(
        self,
        what: str,
        total: int,
        shown: bool,
        columns: Sequence[ProgressColumn],
        text: Callable[[float, float], str],
        transient: bool = False,
    ) -> None:
        self._what, self._total, self._text = what, total, text
        self._progress = bar_of((TextColumn(what), BarColumn(), *columns, EtaColumn()), shown, transient)
        self._task = self._progress.add_task(what, total=total)
        self._lines = LogLines() if shown and self._progress.disable else None
        self._lock = threading.Lock()
        self._appears = math.inf

    @property
    def done(self) -> int:
        """Count reached so far."""
        return int(self._progress.tasks[0].completed)

    def add(self, count: int) -> None:
        """Advance the bar by a count."""
        self._progress.advance(self._task, count)
        if self._lines is not None:
            self._lines.say(lambda: f"{self._what} {self._text(self.done, self._total)}")
        elif not self._progress.disable and time.monotonic() >= self._appears:
            with self._lock:
                if not self._progress.live.is_started and self._appears < math.inf:
                    self._progress.start()

    def __enter__(self) -> Self:
        self._appears = time.monotonic() + PATIENCE
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._appears = math.inf
            if self._progress.live.is_started:
                self._progress.stop()


class SampleBar(_CountBar):
    """Progress bar of samples; see :class:`_CountBar`."""

    def __init__(self, what: str, total: int, shown: bool = True) -> None:
        super().__init__(what, total, shown, [MofNCompleteColumn()], lambda done, total: f"{done:,.0f} of {total:,.0f}")


class ByteBar(_CountBar):
    """Progress bar of the bytes of a long transfer, removed at its end; see :class:`_CountBar`."""

    def __init__(self, what: str, total: int, shown: bool = True) -> None:
        super().__init__(what, total, shown, [BytesColumn()], amount, transient=True)
