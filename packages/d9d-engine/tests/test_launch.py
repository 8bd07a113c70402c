"""`d9d train --nproc` and torchrun: one cause at the end, restarts, Ctrl-C, and no process left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import d9d_testing.toy.plugin as toy
import pytest
from d9d_core.errors import JobError, PluginError
from d9d_engine.launch import agent
from d9d_engine.launch.agent import Launch, cause, run_module
from d9d_engine.launch.process import ERROR_FILE, Process, running
from d9d_engine.launch.ranks import Ended, Rank
from d9d_engine.process_env import ProcessEnv
from d9d_engine.run.interrupt import Interrupts, Terminated
from d9d_engine.supervision.failure import ErrorFile, Failure
from d9d_testing.processes import LOOPBACK, is_running, listening_at, ranks_of

#: Stands for a job that uses several processes: three steps, each with a collective.
ENTRY = """
import os, signal, sys, time, warnings
from pathlib import Path
from d9d_engine.launch.process import running
from d9d_engine.run.interrupt import Interrupts
from d9d_core.plugin.manifest import Manifest
from d9d_engine.supervision.identity import Identity
from d9d_engine.process_env import ProcessEnv

what, directory = sys.argv[1], Path(sys.argv[2])
place = ProcessEnv.from_environment(os.environ)
with Interrupts().noted() as interrupts, running(place, os.environ, interrupts) as process:
    import torch
    from torch import distributed as dist
    from d9d_engine.distributed.mesh import describe_rank
    from d9d_engine.distributed.world import joined

    sizes = {"pp": 1, "dp_replicate": 1, "dp_shard": place.world_size, "cp": 1, "tp": 1, "ep": 1}
    job = {"seed": place.rank if what == "differs" else 0}
    reporter = process.reporter(describe_rank(sizes, place.rank))
    limits = {"startup": 60, "step": 3 if what == "hangs" else 60, "checkpoint": 60}
    (directory / f"here-{place.rank}").touch()
    while what == "waits":
        time.sleep(0.05)
    with joined(place, torch.device("cpu"), Identity.of(Manifest({}), job), sizes, limits, reporter) as world:
        warnings.warn("take care")
        (directory / f"built-{place.rank}").touch()
        time.sleep(60 if what == "builds" else 0)
        with interrupts:
            for step in range(3 if what in ("raises", "killed once", "") else 1000):
                world.watchdog.phase("step", step)
                while what == "stuck" and step == 1 and place.rank == 1 and interrupts.requested is None:
                    time.sleep(0.05)  # the other one waits in the collective
                total = torch.tensor([float(interrupts.requested is not None), 0.0])
                if step == 1 and place.rank == 1 and what == "raises":
                    raise ValueError("broken")
                if step == 1 and place.rank == 1 and what == "killed once" and not (directory / "killed").exists():
                    (directory / "killed").touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                dist.all_reduce(total)
                if total[0] > 0:
                    break
                (directory / f"ready-{place.rank}").touch()
                time.sleep(0.05 if what in ("long", "saves", "hangs") else 0)
            late = time.monotonic() + 30
            while what == "long" and interrupts.requested is None and time.monotonic() < late:
                time.sleep(0.01)  # another rank had the signal first; each gets it
            time.sleep(3 if what == "saves" else 0)
            end = "all steps" if total[0] == 0 else interrupts.requested
        os.write(1, f"rank {place.rank} saved after {end}\\n".encode())  # in one piece
"""
PARENT = """
import sys
from d9d_engine.launch.agent import Launch
restarts, *arguments = sys.argv[1:]
sys.exit(Launch(arguments, 2, int(restarts), lambda rank: f"rank {rank} (dp_shard={rank})").run())
"""
Run = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Run]:
    """Start two processes of the entry point, with the given parent in between."""
    entry, parent = tmp_path / "entry.py", tmp_path / "parent.py"
    entry.write_text(ENTRY)
    parent.write_text(PARENT)
    environ = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "LOGLEVEL")}
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    started: list[subprocess.Popen[str]] = []

    def run(what: str, launcher: str = "d9d", restarts: int = 0, **variables: str) -> subprocess.Popen[str]:
        before = [str(parent), str(restarts)] if launcher == "d9d" else [*torchrun, "--rdzv-endpoint", "localhost:0"]
        command = [sys.executable, *before, str(entry), what, str(tmp_path)]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ | variables
        )
        started.append(process)
        return process

    yield run
    for process in started:
        for pid in [*ranks_of(process.pid).values(), process.pid]:  # a stopped one does not notice
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate()


def wait_for(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


# --- real processes --------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_the_traceback_of_the_failing_rank_is_printed_last_and_once(start: Run, tmp_path: Path) -> None:
    process = start("raises")
    _, errors = process.communicate(timeout=90)
    assert process.returncode == 1
    before, _, traceback = errors.partition("rank 1 (dp_shard=1) on ")
    host, *lines = traceback.splitlines()
    assert host.endswith(" failed:")
    assert lines[0] == "Traceback (most recent call last):"
    assert f"{tmp_path}/entry.py" in lines[1]  # no frame of the machinery in between
    assert lines[-1] == "ValueError: broken"
    assert "Traceback" not in before
    assert "OMP_NUM_THREADS" not in before
    warnings = [line for line in before.splitlines() if "UserWarning: take care" in line]
    assert sorted(line.startswith("rank 1 (dp_shard=1): ") for line in warnings) == [False, True]


@pytest.mark.thorough
def test_plain_torchrun_shows_the_same_cause(start: Run) -> None:
    process = start("raises", launcher="torchrun")
    _, errors = process.communicate(timeout=90)
    assert process.returncode == 1
    root = errors.partition("Root Cause (first observed failure):")[2]
    assert "traceback : rank 1 (dp_shard=1) on " in root
    assert "ValueError: broken" in root
    assert errors.count("ValueError: broken") == 1


@pytest.mark.thorough
def test_an_error_of_all_ranks_is_one_message_with_its_exit_status(start: Run) -> None:
    process = start("differs", restarts=3)
    _, errors = process.communicate(timeout=90)
    assert process.returncode == 2
    text = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert len(text) == 1
    assert text[0].startswith("error: the job differs across ranks: seed: rank 0 (")
    assert "restart" not in errors


@pytest.mark.thorough
def test_after_a_killed_rank_all_start_again(start: Run) -> None:
    process = start("killed once", restarts=1)
    output, errors = process.communicate(timeout=90)
    assert process.returncode == 0, errors
    assert sorted(output.splitlines()) == ["rank 0 saved after all steps", "rank 1 saved after all steps"]
    lines = [line for line in errors.splitlines() if "take care" not in line and "warnings.warn" not in line]
    assert lines[0].startswith("rank 1 (dp_shard=1) on ")
    assert " was killed by SIGKILL" in lines[0]
    assert lines[1:] == ["starting all 2 processes again (restart 1 of 1)"]


@pytest.mark.thorough
def test_ctrl_c_lets_all_ranks_save_and_ends_well(start: Run, tmp_path: Path) -> None:
    process = start("long")
    wait_for(lambda: len(list(tmp_path.glob("ready-*"))) == 2)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert sorted(output.splitlines()) == ["rank 0 saved after SIGINT", "rank 1 saved after SIGINT"]
    assert "Traceback" not in errors


@pytest.mark.thorough
@pytest.mark.parametrize("order", ["1L0", "0", "1", "01L", "L01"])
def test_sigterm_to_any_process_in_any_order_lets_all_ranks_save(start: Run, tmp_path: Path, order: str) -> None:
    process = start("saves")
    wait_for(lambda: len(list(tmp_path.glob("ready-*"))) == 2)
    pids = {"L": process.pid, **{str(rank): pid for rank, pid in ranks_of(process.pid).items()}}
    for who in order:
        os.kill(pids[who], signal.SIGTERM)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert sorted(output.splitlines()) == ["rank 0 saved after SIGTERM", "rank 1 saved after SIGTERM"]
    assert "Traceback" not in errors


@pytest.mark.thorough
def test_a_rank_whose_main_thread_is_stuck_passes_on_that_it_was_asked_to_stop(start: Run, tmp_path: Path) -> None:
    process = start("stuck")  # rank 1 enters the second collective only when it was asked to stop
    wait_for(lambda: len(list(tmp_path.glob("ready-*"))) == 2)
    time.sleep(0.5)  # so that rank 0 waits there; were it too short, the test would only be less sharp
    os.kill(ranks_of(process.pid)[0], signal.SIGTERM)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "rank 1 saved after SIGTERM" in output


@pytest.mark.thorough
@pytest.mark.parametrize("order", ["0", "1", "L", "1L"])
@pytest.mark.parametrize("moment", ["here", "built"])
def test_sigterm_during_start_up_ends_well_with_nothing_to_save(
    start: Run, tmp_path: Path, moment: str, order: str
) -> None:
    process = start("waits" if moment == "here" else "builds")
    wait_for(lambda: len(list(tmp_path.glob(f"{moment}-*"))) == 2)
    pids = {"L": process.pid, **{str(rank): pid for rank, pid in ranks_of(process.pid).items()}}
    for who in order:
        os.kill(pids[who], signal.SIGTERM)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert output == ""
    assert [line for line in errors.splitlines() if "take care" not in line and "warnings.warn" not in line] == [
        "SIGTERM: stopped during start-up; nothing was trained"
    ]


@pytest.mark.thorough
def test_sigterm_to_a_process_that_has_hardly_begun_ends_well(start: Run) -> None:
    process = start("long")
    # Not any of the launcher's children: to import torch, it starts one, too.
    wait_for(lambda: ranks_of(process.pid))
    os.kill(next(iter(ranks_of(process.pid).values())), signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "SIGTERM: stopped during start-up; nothing was trained\n")


@pytest.mark.thorough
def test_ctrl_c_between_joining_and_the_first_step_says_that_nothing_was_trained(start: Run, tmp_path: Path) -> None:
    process = start("builds")
    wait_for(lambda: len(list(tmp_path.glob("built-*"))) == 2)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.splitlines()[-1] == "interrupted: during start-up; nothing was trained"


@pytest.mark.thorough
def test_a_second_ctrl_c_interrupts_at_once(start: Run, tmp_path: Path) -> None:
    process = start("long")
    wait_for(lambda: len(list(tmp_path.glob("ready-*"))) == 2)
    ranks = ranks_of(process.pid)
    os.kill(ranks[1], signal.SIGSTOP)  # so that the first one has no effect
    process.send_signal(signal.SIGINT)
    wait_for(lambda: not _pending(process.pid, signal.SIGINT))
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output) == (130, "")
    assert errors.splitlines()[-1] == "interrupted"
    assert not any(is_running(pid) for pid in ranks.values())


@pytest.mark.thorough
def test_a_rank_that_stands_still_ends_all_and_they_start_again(start: Run, tmp_path: Path) -> None:
    process = start("hangs", restarts=1)
    wait_for(lambda: len(list(tmp_path.glob("ready-*"))) == 2)
    first = ranks_of(process.pid)
    os.kill(first[1], signal.SIGSTOP)
    assert process.stderr is not None
    seen = []
    while not (seen and seen[-1].startswith("starting all 2 processes again")):
        seen.append(process.stderr.readline())
        assert seen[-1], seen
    assert any(re.match(r"error: no progress for \d+ s in phase 'step' \(timeouts.step\)", line) for line in seen), seen
    assert any(line.startswith("  rank 1: no answer") for line in seen)
    assert not any(is_running(pid) for pid in first.values())
    wait_for(lambda: len(ranks_of(process.pid)) == 2)
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 0


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_launch_listens_on_the_loopback_only_and_when_it_is_killed_leaves_no_file_and_no_process(
    start: Run, tmp_path: Path
) -> None:
    (tmp_path / "temporary").mkdir()
    process = start("long", TMPDIR=str(tmp_path / "temporary"))
    wait_for(lambda: len(list(tmp_path.glob("ready-*"))) == 2)
    ranks = ranks_of(process.pid)
    assert len(ranks) == 2
    found = [address for pid in [process.pid, *ranks.values()] for address in listening_at(pid)]
    assert found
    assert set(found) <= LOOPBACK
    process.kill()
    wait_for(lambda: not any(is_running(pid) for pid in ranks.values()))
    assert list((tmp_path / "temporary").iterdir()) == []


def _pending(pid: int, number: int) -> bool:
    masks = re.findall(r"^(?:Sig|Shd)Pnd:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return any(int(mask, 16) >> (number - 1) & 1 for mask in masks)


# --- the command line ------------------------------------------------------------------------------------------------


@pytest.fixture
def d9d(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    values = {"run": {"name": "toy", "dir": str(tmp_path / "runs")}, "steps": 3, "device": "cpu"}
    values |= {"model": "toy_model", "data": "toy_data", "task": "toy_task", "optimizer": "toy_optimizer"}
    (tmp_path / "job.json").write_text(json.dumps(values))

    def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        code = (
            "import sys, atexit; atexit.register(lambda: print('torch' in sys.modules));"
            "from d9d_core.cli.main import main; main()"
        )
        command = [sys.executable, "-c", code, "train", "job.json", "--no-plugins", "--plugin", toy.__file__]
        return subprocess.run(
            [*command, *arguments], capture_output=True, text=True, cwd=tmp_path, check=False, env=os.environ | environ
        )

    return run


@pytest.mark.thorough
def test_train_with_nproc_starts_the_same_command(d9d: Callable[..., Any], tmp_path: Path) -> None:
    result = d9d("--nproc", "auto", "--max-restarts", "1", "--set", "steps=2")
    assert result.returncode == 0, result.stderr
    assert "step 2/2  loss" in result.stdout
    assert f"finished 2 steps; results in {tmp_path}/runs/toy" in result.stdout
    assert "Traceback" not in result.stderr
    assert "arning" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "environ", "text"),
    [
        (["--nproc", "3", "--set", "mesh.pp=1"], {}, "mesh: one process = 1 rank, but the job was started with 3"),
        (
            ["--nproc", "2", "--set", "mesh.pp=2", "--set", "optimizer.lrr=1"],
            {},
            "optimizer.lrr: not a field of 'toy_optimizer'",
        ),
        (["--nproc", "many"], {}, "--nproc: 'many' is neither a number nor auto"),
        (
            ["--set", "mesh.dp_shard=2"],
            {},
            "change mesh or start 2 processes (d9d train --nproc 2, torchrun, or srun)",
        ),
        (
            ["--nproc", "2"],
            {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
            "--nproc, --max-restarts: torchrun has started this process; tell it instead",
        ),
        ([], {"RANK": "0"}, "RANK is set, but WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE are not"),
    ],
)
def test_what_cannot_start_is_one_message_without_torch(
    d9d: Callable[..., Any], arguments: list[str], environ: dict[str, str], text: str
) -> None:
    result = d9d(*arguments, **environ)
    assert result.returncode == 2
    assert text in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout.splitlines()[-1] == "False"


# --- which failure is the cause --------------------------------------------------------------------------------------


BROKEN = Failure("rank 0 failed:\nRuntimeError: Connection closed by peer", 1, second_hand=True)
OWN = Failure("rank 1 failed:\nValueError: mine", 1)


@pytest.mark.parametrize(
    ("failures", "text"),
    [
        ({0: {"failure": BROKEN}, 1: {"failure": OWN}}, "ValueError: mine"),
        ({0: {"failure": BROKEN}, 1: {"exit_code": -9}}, "rank 1 (x) on {node} was killed by SIGKILL"),
        ({0: {"echoes": True}, 1: {"exit_code": -11}}, "rank 1 (x) on {node} was killed by SIGSEGV"),
        ({0: {"exit_code": -15}, 1: {"failure": OWN}}, "ValueError: mine"),
        ({0: {"failure": BROKEN}, 1: {"exit_code": 7}}, "rank 1 (x) on {node} ended with exit status 7"),
        ({0: {"echoes": True}, 1: {"failure": BROKEN}}, "Connection closed"),
        ({0: {"exit_code": -15}}, "rank 0 (x) on {node} was killed by SIGTERM"),
        ({0: {"exit_code": -9, "ended": 2}, 1: {"exit_code": -6, "ended": 1}}, "rank 1 (x) on {node} was killed by"),
    ],
)
def test_the_cause_is_found_among_its_consequences(failures: dict[int, dict[str, Any]], text: str) -> None:
    import platform

    nothing: Any = None
    failed = [Rank(rank, nothing, nothing, **({"exit_code": 1} | facts)) for rank, facts in failures.items()]
    assert text.format(node=platform.node()) in cause(failed, lambda rank: f"rank {rank} (x)").text


def test_errors_keep_their_exit_status() -> None:
    nothing: Any = None
    failure = Failure.of(PluginError("d9d-moe is missing"))
    assert cause([Rank(0, nothing, nothing, failure=failure, exit_code=2)], str).exit_code == 2


def test_an_agent_finds_the_cause_in_its_file(tmp_path: Path) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    ErrorFile(tmp_path / "error").failed(Failure.of(PluginError("d9d-moe is missing")))
    process = ProcessFailure(0, 1, 1, str(tmp_path / "error"))
    assert process.message["extraInfo"]["py_callstack"] == "error: d9d-moe is missing"  # type: ignore[index]


# --- one process -----------------------------------------------------------------------------------------------------

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


def test_signals_for_a_forked_process_are_for_nobody_else() -> None:
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines() == ["SIGTERM -15 None", "SIGINT -2 None", "SIGTERM -15 None", "False"]


def test_who_asked_a_module_to_stop_is_told_that_it_did(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = Ended(failed=(), asked="SIGINT", training=False, insisted=False)
    monkeypatch.setattr(agent, "run_ranks", lambda *_: ended)
    with pytest.raises(KeyboardInterrupt):
        run_module("greets", [], 2)


@pytest.mark.thorough
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
