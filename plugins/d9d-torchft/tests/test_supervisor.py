"""The supervisor restarts replicas that die, and ends with the status of the job; here with tiny processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from d9d_core.errors import JobError, LaunchError
from d9d_torchft import supervisor
from d9d_torchft.commands.run import run
from d9d_torchft.supervisor import LighthouseProcess, Supervisor, started_lighthouse


@pytest.fixture(autouse=True)
def lighthouse(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen[str]]]:
    """A process instead of a lighthouse."""
    started: list[subprocess.Popen[str]] = []

    def start() -> LighthouseProcess:
        started.append(subprocess.Popen(["sleep", "60"], text=True))
        return LighthouseProcess(started[-1], "http://127.0.0.1:5")

    monkeypatch.setattr(supervisor, "started_lighthouse", start)
    yield started
    assert all(process.poll() is not None for process in started)


def supervised(script: str, restarts: int = 2, names: tuple[str, ...] = ("0", "1")) -> tuple[int, list[str]]:
    """Run replicas with a script, whose ``sys.argv[1]`` is the replica's name; return the status and the lines."""
    lines: list[str] = []
    made = Supervisor(lambda name: [sys.executable, "-c", script, name], names, restarts, lines.append)
    status = made.run()
    assert all(one.process.poll() is not None for one in made.replicas.values())
    return status, lines


def test_a_replica_that_dies_is_started_again_with_its_settings(tmp_path: Path) -> None:
    script = f"""
import os, pathlib, signal, sys, time
token = pathlib.Path(os.environ["D9D_TORCHFT_TOKEN_FILE"])
print(os.environ["D9D_TORCHFT_REPLICA"], os.environ["D9D_TORCHFT_LIGHTHOUSE"], oct(token.stat().st_mode)[-3:],
    len(token.read_text()), flush=True)
mark = pathlib.Path({str(tmp_path)!r}, "died")
if sys.argv[1] == "1" and not mark.exists():
    mark.touch()
    os.kill(os.getpid(), signal.SIGKILL)
while not mark.exists():
    time.sleep(0.01)
time.sleep(0.5)
"""
    status, lines = supervised(script)
    assert status == 0
    assert lines.count("1: 1 http://127.0.0.1:5 600 64") == 2
    assert lines.count("0: 0 http://127.0.0.1:5 600 64") == 1
    assert "1 was killed by SIGKILL; restart 1 of 2" in lines


def test_too_many_restarts_and_errors_in_the_job_end_the_run() -> None:
    status, lines = supervised("import sys; sys.exit(5)", restarts=2, names=("0",))
    assert status == 1
    assert lines == ["0 ended with status 5; restart 1 of 2", "0 ended with status 5; restart 2 of 2"]
    status, lines = supervised("import sys, time; sys.exit(2) if sys.argv[1] == '0' else time.sleep(60)")
    assert status == 2
    assert lines == ["a replica ended with an error in the job; all replicas end"]


def test_a_stop_reaches_all_replicas_which_may_save() -> None:
    script = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), sys.exit(75)))
print("ready", flush=True)
time.sleep(60)
"""
    lines: list[str] = []
    made = Supervisor(lambda _name: [sys.executable, "-c", script], ["0", "1"], 5, lines.append)

    def stop() -> None:
        while len(lines) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop).start()
    assert made.run() == 75
    assert {"0: saved", "1: saved"} <= set(lines)


def test_replicas_that_fail_when_they_are_stopped_and_a_stop_that_was_not_asked_for_end_with_status_1() -> None:
    assert supervised("import sys; sys.exit(75)", restarts=0)[0] == 1
    script = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
print("ready", flush=True)
time.sleep(60)
"""
    lines: list[str] = []
    made = Supervisor(lambda _name: [sys.executable, "-c", script], ["0"], 5, lines.append)

    def stop() -> None:
        while not lines:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=stop).start()
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    assert made.run() == 1
    assert lines == ["0: ready"]  # it is not started again
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def test_replicas_may_end_after_the_first_one_but_not_long_after(monkeypatch: pytest.MonkeyPatch) -> None:
    script = """
import sys, time
if sys.argv[1] != "0":
    time.sleep(0.4)
    print("finished", flush=True)
    time.sleep(60 * (sys.argv[1] == "2"))
    sys.exit(1)
"""
    status, lines = supervised(script)
    assert (status, lines) == (0, ["1: finished"])  # without a restart: the last step is done
    monkeypatch.setattr(supervisor, "_LAST", 0.01)
    assert supervised(script, names=("0", "2"))[0] == 0


def test_the_last_lines_of_replicas_are_printed_and_bytes_that_are_no_text_replaced() -> None:
    lines: list[str] = []

    def say(line: str) -> None:
        time.sleep(0.1)  # a slow terminal
        lines.append(line)

    script = r"import sys; sys.stdout.buffer.write(b'one  \nt\xffwo\nthree'); sys.stderr.write('\nfour\n')"
    made = Supervisor(lambda _name: [sys.executable, "-c", script], ["a"], 0, say)
    assert made.run() == 0
    assert sorted(lines) == ["a: four", "a: one", "a: three", "a: t\ufffdwo"]


@pytest.mark.parametrize("in_memory", [True, False])
def test_replicas_have_sessions_of_their_own_and_a_token_that_ends_with_the_command(
    in_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not in_memory:
        monkeypatch.delattr(os, "memfd_create", raising=False)
    elif not hasattr(os, "memfd_create"):
        pytest.skip("files in memory are of Linux")
    script = """
import os, stat
token = os.environ["D9D_TORCHFT_TOKEN_FILE"]
print(token, oct(os.stat(token).st_mode)[-3:], len(open(token).read()), os.getsid(0) == os.getpid())
"""
    status, (line,) = supervised(script, names=("a",))
    token = line.split()[1]
    assert status == 0
    assert line == f"a: {token} 600 64 True"
    assert token.startswith("/proc/") == in_memory
    assert not Path(token).exists()


def program(directory: Path, script: str) -> SimpleNamespace:
    """Stand-in of ``sys`` whose Python is a script of the shell; it writes its arguments to a file."""
    file = directory / "python"
    file.write_text(f'#!/bin/sh\necho "$@" > {directory}/arguments\n{script}\n')
    file.chmod(0o700)
    return SimpleNamespace(executable=str(file))


def test_a_lighthouse_is_started_at_a_free_port_and_ends_with_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        supervisor, "sys", program(tmp_path, "echo 'lighthouse: http://127.0.0.1:7'; exec sleep 60 >&- 2>&-")
    )
    found = started_lighthouse()
    try:
        assert found.address == "http://127.0.0.1:7"
        assert found.process.poll() is None
        assert os.getsid(found.process.pid) == found.process.pid  # Ctrl-C does not reach it
    finally:
        found.process.kill()
        found.process.wait()
    arguments = (tmp_path / "arguments").read_text()
    assert arguments == "-m d9d_core torchft lighthouse --address 127.0.0.1:0 --child\n"


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo 'error: torchft cannot be imported' >&2; exit 2", "torchft cannot be imported"),
        ("echo 'Hello'; echo 'an odd error' >&2", "an odd error"),
        ("exit 0", "no answer"),
        ("exec sleep 60", "no answer"),
    ],
    ids=["error", "other", "silent", "hangs"],
)
def test_a_lighthouse_that_does_not_start_is_an_error(
    script: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "sys", program(tmp_path, script))
    monkeypatch.setattr(supervisor, "_START", 0.3 if "sleep" in script else 30.0)
    with pytest.raises(LaunchError) as caught:
        started_lighthouse()
    assert str(caught.value) == f"the lighthouse did not start: {reason}"


def test_a_lost_lighthouse_ends_the_run(lighthouse: list[subprocess.Popen[str]]) -> None:
    def kill() -> None:
        while not lighthouse:
            time.sleep(0.01)
        lighthouse[0].kill()

    threading.Thread(target=kill).start()
    with pytest.raises(LaunchError, match="the lighthouse has died; start the command again"):
        supervised("import time; time.sleep(60)")


def test_a_job_without_the_strategy_is_refused(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text(
        '{"steps": 1, "model": "toy_model", "data": "toy_data", "task": "toy_task", "optimizer": "toy_optimizer"}'
    )
    import d9d_testing.toy.plugin as toy

    with pytest.raises(JobError, match="the strategy torchft is missing; add it, such as --set"):
        run(tmp_path / "job.json", 2, 1, [], [Path(toy.__file__)])
