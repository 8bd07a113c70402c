"""Progress bars: on a terminal's standard error, in a notebook's cell, and nowhere else."""

from __future__ import annotations

import builtins
import re

import pytest
from d9d_engine.run.progress import ProgressBar, SampleBar


class ZMQInteractiveShell:
    """Shell of a notebook's kernel, by which libraries know it."""


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtins, "get_ipython", ZMQInteractiveShell, raising=False)


def show() -> None:
    with ProgressBar(4, 0) as steps:
        for step in range(1, 5):
            steps.issued(step, 0.1)
            steps.update(step, 2.5)
            print(f"line {step}")
    with SampleBar("inference", 3) as samples:
        samples.add(3)


@pytest.mark.usefixtures("notebook")
def test_bars_are_lines_of_a_notebooks_cell_that_lose_no_other_line(capsys: pytest.CaptureFixture[str]) -> None:
    show()
    out, err = capsys.readouterr()
    assert err == ""
    assert "training" in out
    assert "4/4" in out
    assert "loss 2.500" in out
    assert "inference" in out
    lines = [seen(line) for line in out.split("\n")]
    assert [line for line in lines if line.startswith("line")] == [f"line {step}" for step in range(1, 5)]


def seen(line: str) -> str:
    """Line as a notebook shows it: what follows a carriage return is written over what was there; nothing is erased."""
    shown = ""
    for part in re.sub(r"\x1b\[[^@-~]*[@-~]", "", line).split("\r"):
        shown = part + shown[len(part) :]
    return shown.rstrip()


@pytest.mark.usefixtures("notebook")
def test_a_rank_that_is_not_shown_writes_nothing_in_a_notebook(capsys: pytest.CaptureFixture[str]) -> None:
    with SampleBar("inference", 3, shown=False) as samples:
        samples.add(3)
    assert capsys.readouterr() == ("", "")


def test_a_pipe_gets_no_bars(capsys: pytest.CaptureFixture[str]) -> None:
    show()
    out, err = capsys.readouterr()
    assert (out, err) == ("line 1\nline 2\nline 3\nline 4\n", "")
