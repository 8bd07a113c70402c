"""A run that has finished ends, whatever threads and processes are left; of two launches the second fails at once."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from d9d_engine.run.interrupt import STOPPED

Write = Callable[..., Path]
D9D = [sys.executable, "-m", "d9d_core"]
#: Plugin that leaves something running, which never ends by itself.
LEAVES = """
import multiprocessing, os, threading, time
import d9d_core.cli.ending
d9d_core.cli.ending.PATIENCE = 1.0  # of thirty seconds

def never_ends():
    while True:
        time.sleep(0.1)

def leave(what):
    if what == "thread":
        threading.Thread(target=never_ends, name="uploader").start()
    else:
        multiprocessing.get_context("fork").Process(target=never_ends, name="uploader").start()

if os.environ.get("RANK", "0") in {ranks!r}:
    leave({what!r})
"""


def left(tmp_path: Path, what: str = "thread", ranks: str = "01") -> dict[str, Any]:
    file = tmp_path / "leaves.py"
    file.write_text(LEAVES.format(what=what, ranks=ranks))
    return {"plugins": {"files": [str(file)]}}


def run(*arguments: str) -> tuple[int, str]:
    done = subprocess.run([*D9D, *arguments], capture_output=True, text=True, timeout=100, check=False)
    return done.returncode, done.stderr


@pytest.mark.thorough
def test_a_stopped_run_has_its_own_status_and_a_finished_one_0(small_job: Write, tmp_path: Path) -> None:
    job = str(small_job("run", steps=400, logging={"every": 1}))
    directory = tmp_path / "runs" / "run"
    with subprocess.Popen([*D9D, "train", job], stdout=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        while not (directory / "metrics.jsonl").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == STOPPED
    stopped = json.loads((directory / "stopped.json").read_text())
    assert (stopped["steps"], stopped["request"]) == (400, "SIGTERM")
    assert [int(one.name[5:]) for one in (directory / "checkpoints").glob("step-*")] == [stopped["step"]]
    status, errors = run("train", job)
    assert status == 0, errors
    assert not (directory / "stopped.json").exists()
    assert (directory / "finished.json").exists()


@pytest.mark.full
def test_commands_on_two_machines_train_one_job_and_stop_together(small_job: Write, tmp_path: Path) -> None:
    job = str(small_job("run", steps=2000, logging={"every": 1}, mesh={"dp_shard": 2}, parallel=["fsdp"]))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    several = ("--nproc", "1", "--nodes", "2", "--master", f"127.0.0.1:{port}")
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    commands = [[*D9D, "train", job, *several, "--node-rank", str(rank)] for rank in (0, 1)]
    machines = [subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) for command in commands]
    directory = tmp_path / "runs" / "run"
    try:
        deadline = time.monotonic() + 90
        while not (directory / "metrics.jsonl").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        machines[1].send_signal(signal.SIGTERM)
        first, second = (machine.communicate(timeout=60)[0] for machine in machines)
    finally:
        for machine in machines:
            machine.kill()
            machine.wait()
    assert [machine.returncode for machine in machines] == [STOPPED, STOPPED]
    assert "stopped after step" in first
    assert second == ""
    assert json.loads((directory / "stopped.json").read_text())["steps"] == 2000


@pytest.mark.thorough
@pytest.mark.parametrize("what", ["thread", pytest.param("process", marks=pytest.mark.full)])
def test_a_finished_run_ends_with_its_status_and_says_what_was_left(
    small_job: Write, tmp_path: Path, what: str
) -> None:
    status, errors = run("train", str(small_job("run", **left(tmp_path, what))))
    assert status == 0, errors
    assert f"but the {what} 'uploader' (" in errors
    assert "still runs; this process ends without it" in errors
    assert json.loads((tmp_path / "runs" / "run" / "finished.json").read_text())["step"] == 6


def test_a_command_that_failed_ends_with_its_own_status(small_job: Write, tmp_path: Path) -> None:
    status, errors = run("check", str(small_job("run", steps=0, **left(tmp_path))))
    assert status == 2
    assert "steps: input should be greater than 0" in errors
    assert "the thread 'uploader'" in errors


@pytest.mark.full
@pytest.mark.parametrize("ranks", ["0", "1", "01"])
def test_a_finished_launch_ends_whichever_ranks_leave_a_thread(small_job: Write, tmp_path: Path, ranks: str) -> None:
    layout: dict[str, Any] = {"mesh": {"dp_replicate": 2}, "parallel": ["replicate"]}
    job = small_job("run", **layout, **left(tmp_path, ranks=ranks))
    status, errors = run("train", str(job), "--nproc", "2")
    assert status == 0, errors
    assert errors.count("the thread 'uploader'") >= len(ranks)


@pytest.mark.thorough
def test_of_two_launches_of_one_directory_the_second_fails_before_it_reads_data_and_weights(
    small_job: Write, tmp_path: Path
) -> None:
    first = subprocess.Popen([*D9D, "train", str(small_job("run", steps=100_000))], stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "runs" / "run" / "metrics.jsonl").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        done = subprocess.run(
            [*D9D, "train", str(tmp_path / "run.json")], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 2
        assert "is in use by another training run" in done.stderr
        assert "data:" not in done.stdout
        assert "model:" not in done.stdout
    finally:
        first.kill()
        first.wait()
