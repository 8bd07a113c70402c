"""A terminal that is closed, a reader of the output that goes away and a full disk behind it end no run."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pytest
from d9d_engine.run.interrupt import STOPPED

Write = Callable[..., Path]
D9D = [sys.executable, "-m", "d9d_core"]
pytestmark = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")


def ignoring_hangups() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def pipe_without_reader() -> int:
    reading, writing = os.pipe()
    os.close(reading)
    return writing


def full_disk() -> int:
    return os.open("/dev/full", os.O_WRONLY)


def closed_terminal() -> int:
    ours, theirs = pty.openpty()
    os.close(ours)
    return theirs


SINKS = {"reader gone": pipe_without_reader, "disk full": full_disk, "terminal closed": closed_terminal}


def run(*arguments: str, out: int | IO[Any], err: int | IO[Any] = subprocess.PIPE) -> tuple[int, str]:
    done = subprocess.run([*D9D, *arguments], stdout=out, stderr=err, text=True, timeout=120, check=False)
    return done.returncode, done.stderr or ""


@pytest.mark.thorough
@pytest.mark.parametrize("sink", ["reader gone", *(pytest.param(s, marks=pytest.mark.full) for s in list(SINKS)[1:])])
def test_a_run_whose_output_nobody_takes_finishes_with_status_0(small_job: Write, tmp_path: Path, sink: str) -> None:
    out, err = SINKS[sink](), SINKS[sink]()
    status, _ = run("train", str(small_job("run", checkpoint={"every": 2})), out=out, err=err)
    assert status == 0
    assert json.loads((tmp_path / "runs" / "run" / "finished.json").read_text())["step"] == 6
    os.close(out)
    os.close(err)


@pytest.mark.full
@pytest.mark.parametrize("sink", SINKS)
def test_a_launch_whose_output_nobody_takes_finishes_with_status_0(small_job: Write, tmp_path: Path, sink: str) -> None:
    out, err = SINKS[sink](), SINKS[sink]()
    job = small_job("run", mesh={"dp_replicate": 2}, parallel=["replicate"])
    assert run("train", str(job), "--nproc", "2", out=out, err=err)[0] == 0
    assert json.loads((tmp_path / "runs" / "run" / "finished.json").read_text())["step"] == 6


#: Commands whose result is their output, in all their ways to write: rich, typer, print.
PRINTING = [
    ("schema",),
    *(
        pytest.param(words, marks=pytest.mark.full)
        for words in (("--help",), ("plugins", "list"), ("plugins", "show", "adamw"), ("train", "--help"))
    ),
]


@pytest.mark.thorough
@pytest.mark.parametrize("arguments", PRINTING)
def test_a_command_whose_reader_goes_away_ends_quietly_and_one_on_a_full_disk_says_so(
    arguments: tuple[str, ...],
) -> None:
    for sink in ("reader gone", "terminal closed"):
        assert run(*arguments, out=SINKS[sink]()) == (0, "")
    status, error = run(*arguments, out=full_disk())
    assert (status, error) == (1, "error: standard output: No space left on device; the output is not complete\n")


def test_errors_keep_their_status_where_nobody_reads_them(tmp_path: Path) -> None:
    for sink in SINKS.values():
        assert run("check", str(tmp_path / "none.yaml"), out=sink(), err=sink())[0] == 2


def wait_until_it_trains(run: Path) -> None:
    deadline = time.monotonic() + 90
    while not (run / "metrics.jsonl").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "processes", [1, pytest.param(2, marks=pytest.mark.full)]
)  # fmt: skip
def test_a_closed_terminal_lets_the_run_save_and_end(small_job: Write, tmp_path: Path, processes: int) -> None:
    """The terminal is a real one: its end hangs up, and later writes to it fail."""
    layout: dict[str, Any] = {"mesh": {"dp_replicate": 2}, "parallel": ["replicate"]} if processes == 2 else {}
    job = small_job("run", steps=100_000, **layout)
    child, terminal = pty.fork()
    if child == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored, it would be ignored there, too
        os.execv(sys.executable, [*D9D, "train", str(job), *["--nproc", "2"] * (processes == 2)])
    wait_until_it_trains(tmp_path / "runs" / "run")
    os.close(terminal)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == STOPPED
    checkpoints = tmp_path / "runs" / "run" / "checkpoints"
    newest = max(checkpoints.glob("step-*"))
    lines = (tmp_path / "runs" / "run" / "metrics.jsonl").read_text().splitlines()
    assert int(newest.name.removeprefix("step-")) >= json.loads(lines[-1])["step"]


@pytest.mark.thorough
def test_a_run_under_nohup_goes_on_when_the_terminal_is_closed(small_job: Write, tmp_path: Path) -> None:
    job = small_job("run", steps=24, checkpoint={})
    process = subprocess.Popen(
        [*D9D, "train", str(job)], stdout=subprocess.DEVNULL, preexec_fn=ignoring_hangups  # noqa: PLW1509
    )  # fmt: skip
    wait_until_it_trains(tmp_path / "runs" / "run")
    process.send_signal(signal.SIGHUP)
    assert process.wait(120) == 0
    assert json.loads((tmp_path / "runs" / "run" / "finished.json").read_text())["step"] == 24
