"""One process of a launch: its errors, signals, requests to stop, and modules started in processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from d9d_core.errors import JobError
from d9d_engine.launch import agent
from d9d_engine.launch.agent import Launch, run_module
from d9d_engine.launch.process import ERROR_FILE, Process, running
from d9d_engine.launch.ranks import Ended
from d9d_engine.process_env import ProcessEnv
from d9d_engine.run.interrupt import Interrupts, Terminated

SECOND = ProcessEnv(1, 2, 1, 2, "node-a", "torchrun")


def test_an_error_before_the_ranks_meet_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"), running(SECOND, {}, Interrupts()):
        raise JobError("no such file")
    assert capsys.readouterr().err == "error: no such file\n"
    with pytest.raises(SystemExit, match="2"), running(SECOND, {ERROR_FILE: str(tmp_path / "error")}, Interrupts()):
        raise JobError("no such file")
    assert capsys.readouterr().err == ""
    assert json.loads((tmp_path / "error").read_text())["message"]["message"] == "error: no such file"


def test_what_was_told_is_not_told_again(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(process: Process) -> None:
        error = ValueError("mine")
        process.reporter("rank 1 (tp=1)").raised(error, claim=lambda name: name)
        raise error

    with pytest.raises(SystemExit, match="1"), running(SECOND, {}, Interrupts()) as process:
        fail(process)
    assert capsys.readouterr().err == "rank 1 (tp=1) on node-a failed:\nValueError: mine\n"


def test_a_process_alone_raises_as_usual() -> None:
    with pytest.raises(ValueError, match="mine"), running(ProcessEnv(), {}, Interrupts()):
        raise ValueError("mine")


@pytest.mark.thorough
def test_the_launcher_leaves_its_own_process_as_it_was() -> None:
    before, handler = dict(os.environ), signal.getsignal(signal.SIGINT)
    assert Launch(("-c", "import os; os._exit(0 if os.environ['OMP_NUM_THREADS'] else 1)"), 1, 0, str).run() == 0
    assert dict(os.environ) == before
    assert signal.getsignal(signal.SIGINT) == handler


def test_sigterm_before_there_is_anything_to_save_ends_a_process_that_is_alone() -> None:
    previous = signal.getsignal(signal.SIGTERM)
    with Interrupts().noted() as interrupts:
        with pytest.raises(Terminated), interrupts.raised():
            signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Terminated), interrupts.raised():
            raise AssertionError("must not begin")
        with interrupts:  # what has begun in spite of it stops after its first step
            assert interrupts.requested == "SIGTERM"
        assert interrupts.requested is None
        with interrupts.raised():
            pass
        signal.raise_signal(signal.SIGTERM)  # outside of the blocks, it is only noted
        assert interrupts.requested == "SIGTERM"
    assert signal.getsignal(signal.SIGTERM) == previous


def test_what_another_took_for_a_failure_of_its_own_was_a_request_to_stop() -> None:
    def load_a_plugin() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        except BaseException as error:
            raise ValueError("the plugin failed") from error

    with Interrupts().noted() as interrupts, pytest.raises(Terminated), interrupts.raised():
        load_a_plugin()
    with pytest.raises(ValueError, match="mine"), Interrupts().noted() as interrupts, interrupts.raised():
        raise ValueError("mine")


FORKS = """
import os, signal, socket, time
from contextlib import nullcontext
from d9d_engine.launch.link import Link
from d9d_engine.launch.process import _follow
from d9d_engine.run.interrupt import Interrupts

here, there = socket.socketpair()
with Interrupts().noted() as interrupts:
    _follow(Link(there), interrupts)
    for number, block in (("SIGTERM", nullcontext()), ("SIGINT", interrupts), ("SIGTERM", interrupts)):
        with block:
            reading, writing = os.pipe()
            if not (worker := os.fork()):
                os.write(writing, b".")
                for _ in range(600):  # a signal right before a sleep is handled after it
                    time.sleep(0.05)
                os._exit(0)
            os.read(reading, 1)
            os.kill(worker, getattr(signal, number))
            print(number, os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]), interrupts.requested)
    time.sleep(0.5)
    print("asked" in here.recv(1000).decode())
"""


@pytest.mark.thorough
def test_signals_for_a_forked_process_are_for_nobody_else() -> None:
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines() == ["SIGTERM -15 None", "SIGINT -2 None", "SIGTERM -15 None", "False"]


def test_who_asked_a_module_to_stop_is_told_that_it_did(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = Ended(failed=(), asked="SIGINT", training=False, insisted=False)
    monkeypatch.setattr(agent, "run_ranks", lambda *_: ended)
    with pytest.raises(KeyboardInterrupt):
        run_module("greets", [], 2)


@pytest.mark.full
def test_a_module_runs_in_processes_that_know_each_other(tmp_path: Path) -> None:
    (tmp_path / "greets.py").write_text(
        "import os, sys\n"
        "from torch import distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.barrier()\n"
        "os.write(1, f'{sys.argv[1]} {dist.get_rank()} of {dist.get_world_size()}\\n'.encode())\n"
        "sys.exit(3 * int(sys.argv[1] == 'fails'))\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with (tmp_path / "output").open("w+") as output:
        assert run_module("greets", ["rank"], 2, environ, output) is None
        failure = run_module("greets", ["fails"], 1, environ, output)
    assert failure is not None
    assert failure.exit_code == 3
    assert sorted((tmp_path / "output").read_text().splitlines()) == ["fails 0 of 1", "rank 0 of 2", "rank 1 of 2"]
