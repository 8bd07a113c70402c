"""Progress bar of a run, on a terminal or in a notebook."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from d9d_weights.progress import ChangingProgress, EtaColumn, LogLines, amount, bar_of
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, TextColumn
from rich.text import Text

from d9d_engine.sparklines import sparklines

#: Width of the loss curve in characters.
_CURVE = 24
#: Redraws per second at most: each takes about a millisecond, during which it holds the interpreter lock.
_PER_SECOND = 4
#: Memory series; a terminal shows the last value of the first one that is logged.
_MEMORY = ("memory/reserved_gib", "memory/allocated_gib", "memory/resident_gib")
#: Width of the label in characters: the longest is ``evaluating``.
_LABEL = 10
#: Space between two values.
_GAP = "  "
_SHOWN = ("tokens_per_second", "mfu", "eval/loss", *_MEMORY)


class _Curve:
    """Curve with a bounded number of points: above the bound, neighbouring points are averaged.

    Args:
        most: half of the largest number of points.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._stride, self._sum, self._count = 1, 0.0, 0
        self.values: list[float] = []  # read by the drawing thread, so only append to it or replace it

    def add(self, value: float) -> None:
        """Add a value to the curve; NaN and infinity are ignored."""
        if not math.isfinite(value):
            return
        self._sum += value
        self._count += 1
        if self._count < self._stride:
            return
        self.values.append(self._sum / self._count)
        self._sum, self._count = 0.0, 0
        if len(self.values) >= 2 * self._most:
            self.values = [(left + right) / 2 for left, right in zip(*[iter(self.values)] * 2, strict=True)]
            self._stride *= 2


class _Values:
    """Values with gaps between them, drawn in lines of the terminal's width."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> Iterator[Text]:
        yield Text("\n".join(lines_of(self._text.split(_GAP), options.max_width)), style="dim")


class _Display(ChangingProgress):
    """Progress bar with a line of text below.

    Args:
        below: returns the text; called by the drawing thread.
    """

    def __init__(self, *columns: ProgressColumn, below: Callable[[], str], **settings: Any) -> None:
        self._text_below = below
        super().__init__(*columns, **settings)

    def get_renderables(self) -> Iterable[RenderableType]:
        """Yield the progress bar and the text below, in lines that end between two values."""
        yield from super().get_renderables()
        yield _Values(self._text_below())

    def contents(self) -> Hashable:
        """Contents of the bar and the line of text below."""
        return super().contents(), self._text_below()


class _Activity:
    """Activity between steps, such as a save, with a text about its processed bytes.

    Args:
        name: name of the activity.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.bytes = ""
        self.lines = LogLines()


class ProgressBar:
    """Progress bar of steps, with the state of the run.

    On a terminal: a bar with the remaining time; below it the loss with its curve, the learning rate, the last logged
    speed, utilisation, memory and evaluation, and the newest checkpoint. In a notebook: one line. See :func:`bar_of`.
    The label of the bar names an evaluation, a save or an export while it runs. The bar costs some microseconds per
    step: a separate thread draws it a few times per second, if it changed.

    Args:
        total: number of steps of the whole run.
        done: number of steps done before.
        shown: whether this process shows the bar; true for one process of a run.
    """

    def __init__(self, total: int, done: int, shown: bool = True) -> None:
        self._lrs: dict[int, float] = {}
        self._loss, self._lr = math.nan, math.nan
        self._curve = _Curve(_CURVE)
        self._logged: dict[str, float] = {}
        self._saved = done or None
        self._activity: _Activity | None = None
        self._shown = shown
        around = (TextColumn(f"{{task.description:<{_LABEL}}}"), BarColumn(), MofNCompleteColumn())
        display = _display([*around, EtaColumn()], self._text_below) if shown else None
        one_line = (*around, TextColumn("{task.fields[shown]}"), EtaColumn())
        self._progress: ChangingProgress = bar_of(one_line, shown) if display is None else display
        self._task = self._progress.add_task("training", total=total, completed=done, shown="")

    @property
    def text(self) -> str:
        """Text of the bar: loss, learning rate and speed."""
        if math.isnan(self._lr):
            return ""
        return _GAP.join([f"loss {self._loss:.3f}", f"lr {self._lr:.1e}", *self._speed()])

    def issued(self, step: int, lr: float) -> None:
        """Record that step ``step`` (1-based) was launched with this learning rate; its loss follows later."""
        self._lrs[step] = lr

    def update(self, step: int, loss: float) -> None:
        """Record that step ``step`` (1-based) is done, with its loss."""
        self._loss, self._lr = loss, self._lrs.pop(step)
        if self._progress.disable:
            return
        self._curve.add(loss)
        if isinstance(self._progress, _Display):
            self._progress.update(self._task, completed=step)
        else:
            self._progress.update(self._task, completed=step, shown=self.text)

    def logged(self, values: Mapping[str, float]) -> None:
        """Show logged values until newer values are logged; ignores series that the bar does not show."""
        self._logged.update({name: values[name] for name in _SHOWN if name in values})

    def saved(self, step: int) -> None:
        """Record that the checkpoint after ``step`` steps is written."""
        self._saved = step

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Name an activity between steps as the bar's label inside the block.

        Args:
            what: name of the activity, such as ``saving``; at most ten characters.
        """
        before, self._activity = self._activity, _Activity(what)
        self._label()
        try:
            yield
        finally:
            self._activity = before
            self._label()

    def told(self, what: str, done: int, total: int) -> None:
        """Show the bytes of an activity, if it is the current one. Any thread may call this.

        Without a terminal, the bytes of a long activity are lines on standard error.

        Args:
            what: name of the activity, which may run in the background, as a save does.
            done: number of processed bytes.
            total: number of all bytes.
        """
        activity = self._activity
        if activity is None or activity.name != what:
            return
        activity.bytes = f"{activity.name} {amount(done, total)}"
        if not self._progress.disable:
            self._label()
        elif self._shown:
            activity.lines.say(lambda: activity.bytes)

    def _label(self) -> None:
        activity = self._activity
        name, text = ("training", "") if activity is None else (activity.name, activity.bytes)
        self._progress.update(self._task, description=name, shown=text or self.text)

    def __enter__(self) -> ProgressBar:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def _speed(self) -> list[str]:
        rate = self._logged.get("tokens_per_second")
        return [] if rate is None else [f"{rate:,.0f} tokens/s"]

    def _text_below(self) -> str:
        """Text below the bar on a terminal."""
        told = "" if (activity := self._activity) is None else activity.bytes
        if math.isnan(self._lr):
            return told or "first step, which includes all compilation"
        curve = sparklines({"loss": list(enumerate(self._curve.values))}, _CURVE)["loss"]
        parts = [f"loss {self._loss:.3f} {curve}", f"lr {self._lr:.1e}", *self._speed()]
        if (share := self._logged.get("mfu")) is not None:
            parts.append(f"MFU {share:.1%}")
        memory = (self._logged.get(name) for name in _MEMORY)
        if (gib := next((value for value in memory if value is not None), None)) is not None:
            parts.append(f"memory {gib:.1f} GiB")
        if (loss := self._logged.get("eval/loss")) is not None:
            parts.append(f"eval/loss {loss:.3f}")
        if self._saved is not None:
            parts.append(f"saved at step {self._saved}")
        if told:
            parts[0] = told
        return _GAP.join(parts)


def lines_of(parts: Iterable[str], width: int) -> list[str]:
    """Join parts to lines of at most ``width`` characters; a longer part is a line of its own."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + len(_GAP) + len(part) <= width:
            lines[-1] += _GAP + part
        else:
            lines.append(part)
    return lines


def _display(columns: Sequence[ProgressColumn], below: Callable[[], str]) -> _Display | None:
    """Bar with text below it, on standard error; ``None`` if standard error is no terminal or in a notebook."""
    console = Console(stderr=True)
    if console.is_jupyter or not sys.stderr.isatty():
        return None
    # If standard output goes to a file, its lines must not appear on the terminal too.
    own_lines = sys.stdout.isatty()
    return _Display(
        *columns,
        below=below,
        console=console,
        redirect_stdout=own_lines,
        speed_estimate_period=600,  # seconds; long enough to show a speed if a step takes minutes
        refresh_per_second=_PER_SECOND,
    )
