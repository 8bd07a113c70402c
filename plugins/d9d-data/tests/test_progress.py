from __future__ import annotations

import io
import sys

from d9d_data.corpus.tokenise import progress_bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_no_bar_without_a_terminal(capsys) -> None:
    with progress_bar("tokenising", 2) as advance:
        advance(2)
    assert capsys.readouterr().err == ""


def test_bar_on_a_terminal(monkeypatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with progress_bar("tokenising", 2) as advance:
        advance(2)
    assert "tokenising" in terminal.getvalue()
