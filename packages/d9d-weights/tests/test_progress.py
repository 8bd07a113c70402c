"""Progress bars: places where they are drawn, their counts, and lines of a notebook's cell."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest
from d9d_weights import progress
from d9d_weights.progress import (
    ByteBar,
    BytesColumn,
    CellStream,
    EtaColumn,
    LogLines,
    SampleBar,
    amount,
    bar_of,
    waiting,
)
from rich.console import Console
from rich.progress import TextColumn


class Stream(io.StringIO):
    """Stream that is a terminal or not."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


class Clock:
    """Clock that tests set."""

    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("shown", "terminal", "drawn"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_a_bar_is_drawn_on_a_terminal_by_one_process(
    shown: bool, terminal: bool, drawn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", Stream(terminal))
    for output in (True, False):
        monkeypatch.setattr(sys, "stdout", Stream(output))
        made = bar_of([], shown)
        assert (made.disable, made.live._redirect_stdout, made.console.stderr) == (not drawn, output, True)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Show operations of any length."""
    monkeypatch.setattr(progress, "PATIENCE", 0.0)


@pytest.mark.usefixtures("at_once")
def test_a_bar_counts_and_ends_with_its_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal := Stream(True))
    for made in (SampleBar("reading", 7), ByteBar("reading", 7)):
        with made as bar:
            bar.add(3)
            bar.add(2)
            assert bar.done == 5
            assert made._progress.live.is_started
        assert not made._progress.live.is_started
        assert made._progress.tasks[0].total == 7
    assert "reading" in terminal.getvalue()
    hidden = SampleBar("other", 2, shown=False)
    with hidden:
        hidden.add(2)
    assert "other" not in terminal.getvalue()


def test_a_cell_overwrites_a_line_with_blanks() -> None:
    stream = io.StringIO()
    cell = CellStream(stream)
    assert cell.write("a\r\x1b[2Kb") == 7
    assert stream.getvalue() == "a\r" + " " * 100 + "\rb"
    assert cell.getvalue() == stream.getvalue()


def test_a_notebook_shows_a_bar_in_its_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    real = progress.Console

    def console(*given: Any, **options: Any) -> Any:
        made = real(*given, **options)
        if options == {"stderr": True}:
            made.is_jupyter = True
        return made

    monkeypatch.setattr(progress, "Console", console)
    monkeypatch.setattr(sys, "stdout", stream := Stream(False))
    made = bar_of([progress.TextColumn("reading")], True)
    assert (made.disable, made.console.is_jupyter, made.console.is_terminal, made.console.width) == (
        False,
        False,
        True,
        100,
    )
    with made:
        made.add_task("", total=1)
    assert "reading" in stream.getvalue()
    assert bar_of([], False).disable


def test_an_operation_of_less_than_a_second_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal := Stream(True))
    with SampleBar("reading", 2) as bar:
        bar.add(2)
    assert terminal.getvalue() == ""
    with waiting("planning"):
        pass
    assert "planning" not in terminal.getvalue()


@pytest.mark.usefixtures("at_once")
def test_an_operation_without_a_count_is_a_line_of_one_process_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for shown, terminal, seen in ((True, True, True), (True, False, False), (False, True, False)):
        monkeypatch.setattr(sys, "stderr", stream := Stream(terminal))
        with waiting("planning", shown):
            pass
        assert ("planning" in stream.getvalue()) == seen


def test_a_log_gets_a_line_with_the_bytes_so_far(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "PERIOD", 0.0)
    with ByteBar("loading weights", 15 * 2**30) as bar:
        bar.add(3 * 2**30)
        bar.add(2**29)
    with SampleBar("inference", 2000) as samples:
        samples.add(1500)
    with SampleBar("of another rank", 2, shown=False) as hidden:
        hidden.add(1)
    assert capsys.readouterr() == (
        "",
        "loading weights 3.0 of 15.0 GiB\nloading weights 3.5 of 15.0 GiB\ninference 1,500 of 2,000\n",
    )


def test_a_log_gets_a_line_in_ten_seconds_at_most(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock(100)
    lines = LogLines(clock)
    for clock.now in (109, 110, 119, 125, 134):
        lines.say(lambda: f"at {clock.now}")
    assert capsys.readouterr().err == "at 110\nat 125\n"


def test_a_bar_is_drawn_again_only_if_it_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal := Stream(True))
    made = bar_of([TextColumn("{task.description}"), TextColumn("{task.completed}")], True)
    made.live.auto_refresh = False
    task = made.add_task("reading", total=3)
    with made:
        frames = []
        for advance in (0, 0, 1, 0):
            made.advance(task, advance)
            made.live.refresh()
            frames.append(terminal.getvalue().count("reading"))
        assert frames == [1, 1, 2, 2]
        made.update(task, description="reading more")
        made.live.refresh()
        assert terminal.getvalue().count("reading") == 3


def test_the_remaining_time_is_shown_from_an_estimate_until_the_end() -> None:
    clock = Clock(0)
    made = progress.ChangingProgress(EtaColumn(), console=Console(file=io.StringIO()), get_time=clock)
    task = made.add_task("", total=100)
    seen = []
    for clock.now, done in ((10, 1), (11, 2), (20, 11), (21, 99), (21.5, 99.75), (22, 100)):
        made.update(task, completed=done)
        seen.append(str(EtaColumn().render(made.tasks[0])))
    assert seen == ["", "ETA 0:01:38", "ETA 0:01:29", "ETA 0:00:01", "ETA 0:00:01", ""]


def test_bytes_are_shown_in_the_unit_of_their_total() -> None:
    assert [amount(2**30, 15 * 2**30), amount(2**19, 2**21), amount(3, 7), amount(0, 0)] == [
        "1.0 of 15.0 GiB",
        "0.5 of 2.0 MiB",
        "3 of 7 B",
        "0 of 0 B",
    ]
    clock = Clock(0)
    made = progress.ChangingProgress(console=Console(file=io.StringIO()), get_time=clock)
    task = made.add_task("", total=2**31)
    seen = []
    for clock.now, count in ((0, 2**28), (1, 2**28)):
        made.advance(task, count)
        seen.append(str(BytesColumn().render(made.tasks[0])))
    assert seen == ["0.2 of 2.0 GiB", "0.5 of 2.0 GiB  256.0 MiB/s"]
