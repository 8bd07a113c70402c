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
    job = str(small_job("run", steps=200, logging={"every": 1}))
    directory = tmp_path / "runs" / "run"
    with subprocess.Popen([*D9D, "train", job], stdout=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        while not (directory / "metrics.jsonl").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == STOPPED
    stopped = json.loads((directory / "stopped.json").read_text())
    assert (stopped["steps"], stopped["request"]) == (200, "SIGTERM")
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


def train_on(nodes: int, job: str, steps: int) -> list[subprocess.CompletedProcess[str]]:
    """Train with one process on each of several machines, which are on this one."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [*D9D, "train", job, "--set", f"steps={steps}", "--nproc", "1"]
    several = ["--nodes", str(nodes), "--master", f"127.0.0.1:{port}"] if nodes > 1 else []
    words = [[*command, *several, *(["--node-rank", str(rank)] if several else [])] for rank in range(nodes)]
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    machines = [subprocess.Popen(one, env=environ, text=True, stdout=-1, stderr=-1) for one in words]
    ended = [machine.communicate(timeout=150) for machine in machines]
    return [
        subprocess.CompletedProcess(machine.args, machine.returncode, *texts)
        for machine, texts in zip(machines, ended, strict=True)
    ]


@pytest.mark.full
def test_a_run_continues_on_one_machine_and_again_on_two_and_one_line_says_so(small_job: Write) -> None:
    job = str(small_job("run", mesh={"dp_shard": "auto"}, parallel=["fsdp"], checkpoint={}, export=False))
    for nodes, steps, line in (
        (2, 4, None),
        (1, 6, "resumed at step 4 of 6, on 1 process instead of 2"),
        (2, 8, "resumed at step 6 of 8, on 2 processes instead of 1"),
    ):
        first, *others = train_on(nodes, job, steps)
        assert [one.returncode for one in (first, *others)] == [0] * nodes, first.stderr
        told = [text for text in first.stdout.splitlines() if text.startswith("resumed")]
        assert told == ([line] if line else [])


#: Subscriber that raises an error of the job's data in rank 1 alone, after a step or at the end; or delays a rank.
BREAKS = """
import os
import time
from d9d_core import events as ev
from d9d_core.errors import DataError
from d9d_core.plugin import Ref, SubscriberSpec, hookimpl
from d9d_core.config import PluginConfig
from d9d_core.subscriber import Subscribes, subscribe
from typing import Literal

D9D_API = 2

class BreaksConfig(PluginConfig):
    'Breaks.'

    name: Literal["breaks"] = "breaks"
    'Selects this subscriber.'
    at_end: bool = False
    'Whether to break at the end.'

class Breaks(Subscribes):
    def __init__(self, config):
        self.at_end = config.at_end

    @subscribe(ev.StepEnds)
    def step(self, event):
        if event.step >= 1 and os.environ.get("SLEEPS") == os.environ["RANK"]:
            time.sleep(3)
        if event.step == 1 and not self.at_end and os.environ["RANK"] == "1":
            raise DataError("record 7 is damaged")

    @subscribe(ev.TrainingFinished)
    def end(self, event):
        if self.at_end and os.environ["RANK"] == "1":
            raise DataError("record 7 is damaged")

@hookimpl
def d9d_subscribers():
    config, build = Ref(f"{__name__}:BreaksConfig"), Ref(f"{__name__}:Breaks")
    yield SubscriberSpec(name="breaks", summary="For a test.", config=config, build=build)
"""


@pytest.mark.full
@pytest.mark.parametrize("at_end", [False, True])
def test_an_error_of_the_job_on_one_machine_is_the_outcome_on_all(
    small_job: Write, tmp_path: Path, at_end: bool
) -> None:
    (tmp_path / "breaks.py").write_text(BREAKS)
    fields = {
        "subscribers": [{"name": "breaks", "at_end": at_end}],
        "plugins": {"files": [str(tmp_path / "breaks.py")]},
    }
    job = str(small_job("run", mesh={"dp_shard": 2}, parallel=["fsdp"], **fields))
    first, second = train_on(2, job, 6)
    assert (first.returncode, second.returncode) == (2, 2), first.stderr
    assert "error: record 7 is damaged" in second.stderr
    assert "because rank 1 (dp_shard=1) on " in first.stderr
    failure = json.loads((tmp_path / "runs" / "run" / "failed.json").read_text())
    assert failure["status"] == 2
    assert "rank 1 (dp_shard=1)" in failure["error"]
    assert not [name for name in ("stopped", "finished") if (tmp_path / "runs" / "run" / f"{name}.json").exists()]


@pytest.mark.full
@pytest.mark.parametrize("asked", [0, 1])
def test_a_second_ctrl_c_on_one_machine_is_one_line_on_the_other(small_job: Write, tmp_path: Path, asked: int) -> None:
    (tmp_path / "breaks.py").write_text(BREAKS)
    plugins = {"files": [str(tmp_path / "breaks.py")]}
    fields = {"subscribers": [{"name": "breaks", "at_end": True}], "plugins": plugins, "logging": {"every": 1}}
    job = str(small_job("run", steps=100, mesh={"dp_shard": 2}, parallel=["fsdp"], **fields))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    several = ("--nproc", "1", "--nodes", "2", "--master", f"127.0.0.1:{port}")
    # The interrupted rank waits for the other one, in a collective that no exception reaches.
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "SLEEPS": str(1 - asked)}
    commands = [[*D9D, "train", job, *several, "--node-rank", str(rank)] for rank in (0, 1)]
    machines = [subprocess.Popen(one, env=environ, text=True, stdout=-1, stderr=-1) for one in commands]
    try:
        deadline = time.monotonic() + 90
        while not (tmp_path / "runs" / "run" / "metrics.jsonl").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        for _ in range(2):
            machines[asked].send_signal(signal.SIGINT)
            time.sleep(0.3)  # two signals at once are one
        errors = [machine.communicate(timeout=60)[1] for machine in machines]
    finally:
        for machine in machines:
            machine.kill()
            machine.wait()
    assert [machine.returncode for machine in machines] == [130, 130], errors
    told = errors[1 - asked].strip().splitlines()
    assert len(told) == 1, told
    assert f"because rank {asked} (dp_shard={asked}) on " in told[0]
    assert "was interrupted" in told[0]


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
