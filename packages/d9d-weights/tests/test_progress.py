"""Progress bars: places where they are drawn, their counts, and lines of a notebook's cell."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest
from d9d_weights import progress
from d9d_weights.progress import ByteBar, CellStream, SampleBar, bar_of


class Stream(io.StringIO):
    """Stream that is a terminal or not."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


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
