from __future__ import annotations

import io
import os
import sys

from d9d_data.corpus.tokenise import progress_bar
from d9d_data.tokenizer.byte_level import train_bpe


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


def test_learning_a_tokenizer_draws_no_bar_of_its_own(monkeypatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    reader, terminal = os.openpty()
    stderr = os.dup(2)
    os.dup2(terminal, 2)
    try:
        train_bpe(["the fox"], 258, "<end>")
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
    os.write(terminal, b"end")
    assert os.read(reader, 3) == b"end"
    os.close(terminal)
    os.close(reader)
