"""Progress bars: on a terminal's standard error, in a notebook's cell, and nowhere else."""

from __future__ import annotations

import builtins
import contextlib
import fcntl
import io
import math
import os
import pty
import re
import struct
import sys
import termios

import pytest
from d9d_engine.run.progress import ProgressBar, _Curve, lines_of
from d9d_weights import progress
from d9d_weights.progress import SampleBar


class Terminal(io.StringIO):
    """Stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


class ZMQInteractiveShell:
    """Shell of a notebook's kernel, by which libraries know it."""


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtins, "get_ipython", ZMQInteractiveShell, raising=False)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Show operations of any length."""
    monkeypatch.setattr(progress, "PATIENCE", 0.0)


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


LIVE = """
import sys
from d9d_engine.run.progress import ProgressBar

with ProgressBar(4, 0) as bar:
    for step in range(1, 5):
        bar.issued(step, 3e-4)
        bar.update(step, 5.0 - step)
        print(f"line {step}")
        print(f"error line {step}", file=sys.stderr)
        if step == 2:
            bar.logged({"tokens_per_second": 1234.0, "mfu": 0.25, "memory/reserved_gib": 2.0, "eval/loss": 1.5})
            bar.saved(2)
        if step == 3 and sys.argv[1] != "none":
            raise {"KeyboardInterrupt": KeyboardInterrupt, "ValueError": ValueError}[sys.argv[1]]
"""


def terminal_shows(argument: str) -> str:
    """Everything that a process writes to a pseudo-terminal of 160 columns."""
    pid, descriptor = pty.fork()
    if pid == 0:
        fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 160, 0, 0))
        environ = os.environ | {"TERM": "xterm-256color", "COLUMNS": "160"}
        os.execve(sys.executable, [sys.executable, "-c", LIVE, argument], environ)
    shown = b""
    with contextlib.suppress(OSError):  # the end of a pseudo-terminal is an error
        while block := os.read(descriptor, 65536):
            shown += block
    os.waitpid(pid, 0)
    os.close(descriptor)
    return shown.decode()


def screen_of(written: str) -> list[str]:
    """Lines of a terminal that has got these characters and sequences."""
    lines, row, column = [""], 0, 0
    for sequence, text in re.findall(r"(\x1b\[[?\d;]*[A-Za-z]|\r|\n)|([^\x1b\r\n]+)", written):
        if sequence == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif sequence == "\r":
            column = 0
        elif sequence.endswith("A"):
            row -= int(sequence[2:-1] or 1)
        elif sequence.endswith("K"):
            lines[row] = "" if sequence[2:-1] == "2" else lines[row][:column]
        lines[row] = lines[row][:column].ljust(column) + text + lines[row][column + len(text) :]
        column += len(text)
    return [line.rstrip() for line in lines]


def test_a_terminal_shows_the_state_of_the_run_below_the_lines_that_others_print() -> None:
    written = terminal_shows("none")
    *lines, bar, state, end = screen_of(written)
    assert lines == [f"{kind} {step}" for step in range(1, 5) for kind in ("line", "error line")]
    assert bar.startswith("training")
    assert bar.endswith("4/4"), "nothing remains"
    logged = r"1,234 tokens/s  MFU 25\.0%  memory 2\.0 GiB  eval/loss 1\.500  saved at step 2"
    expected = rf"loss 1\.000 █+[▁-▇]+▁  lr 3\.0e-04  {logged}"
    assert re.fullmatch(expected, state)
    assert end == ""
    assert written.rindex("\x1b[?25h") > written.rindex("\x1b[?25l"), "the cursor is hidden"


@pytest.mark.thorough
@pytest.mark.parametrize("error", ["KeyboardInterrupt", "ValueError"])
def test_an_error_leaves_the_terminal_as_it_was(error: str) -> None:
    written = terminal_shows(error)
    assert written.rindex("\x1b[?25h") > written.rindex("\x1b[?25l"), "the cursor is hidden"
    lines = screen_of(written)
    assert [line for line in lines if line.startswith("line")] == ["line 1", "line 2", "line 3"]
    assert lines[-2:] == [error, ""]


def test_the_curve_of_a_long_run_is_short_and_keeps_its_mean() -> None:
    bar = ProgressBar(100_000, 0, shown=False)
    curve = bar._curve
    for step in range(96_000):
        curve.add(float(step))
    curve.add(math.nan)
    assert len(curve.values) < 100
    assert curve.values == sorted(curve.values)
    assert sum(curve.values) / len(curve.values) == pytest.approx(48_000, rel=0.05)


def test_a_full_curve_is_halved_to_means_of_neighbours() -> None:
    curve = _Curve(2)
    seen = []
    for value in (1.0, 2.0, math.inf, 3.0, 5.0, 6.0, 8.0, 10.0, 12.0, 1.0, 1.0, 1.0, 5.0):
        curve.add(value)
        seen.append(list(curve.values))
    two, three = [1.5, 4.0], [1.5, 4.0, 7.0]
    halved = [2.75, 9.0]  # from here on, four values are one point
    assert seen == [
        [1.0], [1.0, 2.0], [1.0, 2.0], [1.0, 2.0, 3.0], two, two, three, three, halved, halved, halved, halved,
        [*halved, 2.0],
    ]  # fmt: skip


def test_the_text_below_a_bar_has_a_curve_of_24_characters_and_the_first_known_memory() -> None:
    bar = ProgressBar(100, 7, shown=False)
    assert bar._text_below() == "first step, which includes all compilation"
    for step in range(40):
        bar._curve.add(float(step % 8))
    bar.issued(1, 0.1)
    bar.update(1, 2.0)
    curve = bar._text_below().split("  ")[0].removeprefix("loss 2.000 ")
    assert len(curve) == 24
    bar.logged({"memory/allocated_gib": 1.0, "memory/resident_gib": 3.0, "loss": 5.0})
    assert bar._text_below() == f"loss 2.000 {curve}  lr 1.0e-01  memory 1.0 GiB  saved at step 7"


def test_lines_below_a_bar_end_between_two_values() -> None:
    parts = ["loss 2.000 ▁▂▃", "lr 1.0e-01", "12,000 tokens/s", "saved at step 7"]
    assert lines_of(parts, 200) == ["  ".join(parts)]
    assert lines_of(parts, 26) == ["  ".join(parts[:2]), parts[2], parts[3]]
    assert lines_of(parts, 25) == parts
    assert lines_of(parts, 3) == parts
    assert lines_of([], 80) == []


def test_the_label_and_the_text_of_a_bar_name_an_activity_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Terminal())
    bar = ProgressBar(4, 0)
    bar.issued(1, 0.1)
    bar.update(1, 2.5)
    with bar.doing("evaluating"):
        assert bar._progress.tasks[0].description == "evaluating"
        with bar.doing("exporting"):
            bar.told("saving", 1, 2)  # in the background
            bar.told("exporting", 2**30, 3 * 2**30)
            assert bar._progress.tasks[0].description == "exporting"
            assert bar._text_below() == "exporting 1.0 of 3.0 GiB  lr 1.0e-01"
        assert bar._progress.tasks[0].description == "evaluating"
    assert bar._progress.tasks[0].description == "training"
    bar.told("saving", 1, 2)
    assert bar._text_below() == "loss 2.500 ▁  lr 1.0e-01"


@pytest.mark.usefixtures("notebook")
def test_a_notebook_names_the_bytes_of_an_export(capsys: pytest.CaptureFixture[str]) -> None:
    bar = ProgressBar(1, 0)
    assert bar._progress.live.refresh_per_second == 1
    with bar, bar.doing("exporting"):
        bar.told("exporting", 2**19, 2**20)
        bar._progress.refresh()
    assert "exporting 0.5 of 1.0 MiB" in capsys.readouterr().out


def test_a_log_names_the_bytes_of_an_export_of_the_first_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "PERIOD", 0.0)
    for shown in (True, False):
        with ProgressBar(1, 0, shown) as bar, bar.doing("exporting"):
            bar.told("exporting", 2**19, 2**20)
    assert capsys.readouterr() == ("", "exporting 0.5 of 1.0 MiB\n")
