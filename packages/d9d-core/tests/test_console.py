"""Consoles of commands: hanging indents on a terminal, whole lines in a pipe, equal first columns of tables."""

from __future__ import annotations

import io
import sys

import pytest
from d9d_core.terminal import console as module
from d9d_core.terminal.console import VisibleConsole, console_for, folded, key_value_table
from rich.text import Text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def printed(text: str | Text, width: int = 20, **settings: bool) -> list[str]:
    stream = io.StringIO()
    VisibleConsole(file=stream, width=width, markup=False, highlight=False).print(text, **settings)
    return stream.getvalue().splitlines()


def test_further_lines_of_a_text_are_indented_more_than_its_first_line() -> None:
    assert printed("  norm: layers.0, layers.1 and more") == ["  norm: layers.0,", "      layers.1 and", "      more"]
    assert printed(Text("one two three four [five]\nsix")) == ["one two three four", "    [five]", "six"]
    assert printed("exactly twenty chars") == ["exactly twenty chars"]
    assert printed("a/path/longer/than/the/line/is") == ["a/path/longer/than/t", "    he/line/is"]
    assert printed("one two three four five", soft_wrap=True) == ["one two three four five"]


def test_lines_of_a_pipe_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    long = "word " * 100 + "end"
    monkeypatch.setattr(sys, "stdout", stream := io.StringIO())
    console_for().print(long)
    assert stream.getvalue() == f"{long}\n"
    assert folded(long) == long


def test_a_terminal_narrower_than_a_text_gets_several_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setattr(module, "get_terminal_size", lambda: type("Size", (), {"columns": 16}))
    assert folded("warning: the last tokens\nend") == "warning: the\n    last tokens\nend"


def test_names_and_texts_of_tables_begin_in_the_same_columns() -> None:
    for name in ("run", "predicted"):
        table = key_value_table()
        table.add_row(name, "text")
        stream = io.StringIO()
        VisibleConsole(file=stream, width=40).print(table)
        assert stream.getvalue().index("text") == 12
