"""Launches of several processes, by `d9d train --nproc` or torchrun: one cause, restarts, Ctrl-C, no process left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from d9d_engine.launch.process import Process
from d9d_engine.process_env import ProcessEnv
from d9d_engine.run.interrupt import STOPPED
from d9d_testing.processes import LOOPBACK, is_running, listening_at, ranks_of

#: Stands for a job that uses several processes: three steps, each with a collective.
ENTRY = """
import os, signal, sys, time, warnings
from pathlib import Path
from d9d_engine.launch.process import running
from d9d_engine.run.interrupt import Interrupts
from d9d_core.registry.manifest import Manifest
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


@pytest.mark.full
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


@pytest.mark.full
def test_plain_torchrun_shows_the_same_cause(start: Run) -> None:
    process = start("raises", launcher="torchrun")
    _, errors = process.communicate(timeout=90)
    assert process.returncode == 1
    root = errors.partition("Root Cause (first observed failure):")[2]
    assert "traceback : rank 1 (dp_shard=1) on " in root
    assert "ValueError: broken" in root
    assert errors.count("ValueError: broken") == 1


@pytest.mark.full
def test_an_error_of_all_ranks_is_one_message_with_its_exit_status(start: Run) -> None:
    process = start("differs", restarts=3)
    _, errors = process.communicate(timeout=90)
    assert process.returncode == 2
    text = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert len(text) == 1
    assert text[0].startswith("error: the job differs across ranks: seed: rank 0 (")
    assert "restart" not in errors


@pytest.mark.full
def test_after_a_killed_rank_all_start_again(start: Run) -> None:
    process = start("killed once", restarts=1)
    output, errors = process.communicate(timeout=90)
    assert process.returncode == 0, errors
    assert sorted(output.splitlines()) == ["rank 0 saved after all steps", "rank 1 saved after all steps"]
    lines = [line for line in errors.splitlines() if "take care" not in line and "warnings.warn" not in line]
    assert lines[0].startswith("rank 1 (dp_shard=1) on ")
    assert " was killed by SIGKILL" in lines[0]
    assert lines[1:] == ["starting all 2 processes again (restart 1 of 1)"]


@pytest.mark.full
def test_ctrl_c_lets_all_ranks_save_and_ends_well(start: Run, tmp_path: Path) -> None:
    process = start("long")
    wait_for(lambda: len(list(tmp_path.glob("ready-*"))) == 2)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert sorted(output.splitlines()) == ["rank 0 saved after SIGINT", "rank 1 saved after SIGINT"]
    assert "Traceback" not in errors


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("order", ["1L0", "0", "1", "01L", "L01"])
def test_a_stop_signal_to_any_process_in_any_order_lets_all_ranks_save(
    start: Run, tmp_path: Path, order: str, number: signal.Signals
) -> None:
    process = start("saves")
    wait_for(lambda: len(list(tmp_path.glob("ready-*"))) == 2)
    pids = {"L": process.pid, **{str(rank): pid for rank, pid in ranks_of(process.pid).items()}}
    for who in order:
        os.kill(pids[who], number)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert sorted(output.splitlines()) == [f"rank {rank} saved after {number.name}" for rank in (0, 1)]
    assert "Traceback" not in errors


@pytest.mark.full
def test_a_rank_whose_main_thread_is_stuck_passes_on_that_it_was_asked_to_stop(start: Run, tmp_path: Path) -> None:
    process = start("stuck")  # rank 1 enters the second collective only when it was asked to stop
    wait_for(lambda: len(list(tmp_path.glob("ready-*"))) == 2)
    time.sleep(0.5)  # so that rank 0 waits there; were it too short, the test would only be less sharp
    os.kill(ranks_of(process.pid)[0], signal.SIGTERM)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "rank 1 saved after SIGTERM" in output


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("order", ["0", "1", "L", "1L"])
@pytest.mark.parametrize("moment", ["here", "built"])
def test_a_stop_signal_during_start_up_ends_well_with_nothing_to_save(
    start: Run, tmp_path: Path, moment: str, order: str, number: signal.Signals
) -> None:
    process = start("waits" if moment == "here" else "builds")
    wait_for(lambda: len(list(tmp_path.glob(f"{moment}-*"))) == 2)
    pids = {"L": process.pid, **{str(rank): pid for rank, pid in ranks_of(process.pid).items()}}
    for who in order:
        os.kill(pids[who], number)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == STOPPED, errors
    assert output == ""
    assert [line for line in errors.splitlines() if "take care" not in line and "warnings.warn" not in line] == [
        f"{number.name}: stopped during start-up; nothing was trained"
    ]


@pytest.mark.full
def test_sigterm_to_a_process_that_has_hardly_begun_ends_well(start: Run) -> None:
    process = start("long")
    # Not any of the launcher's children: to import torch, it starts one, too.
    wait_for(lambda: ranks_of(process.pid))
    os.kill(next(iter(ranks_of(process.pid).values())), signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (STOPPED, "SIGTERM: stopped during start-up; nothing was trained\n")


@pytest.mark.full
def test_ctrl_c_between_joining_and_the_first_step_says_that_nothing_was_trained(start: Run, tmp_path: Path) -> None:
    process = start("builds")
    wait_for(lambda: len(list(tmp_path.glob("built-*"))) == 2)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.splitlines()[-1] == "interrupted: during start-up; nothing was trained"


@pytest.mark.full
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


@pytest.mark.full
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
    assert process.returncode == STOPPED


@pytest.mark.full
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


def test_a_warning_of_another_rank_controls_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    env = ProcessEnv.from_environment({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"})
    Process(env, None, repeats=True).warn("a \x1b[2J title", UserWarning, "file \x9b31m", 3)
    err = capsys.readouterr().err
    assert err.startswith(r"rank 1: file \x9b31m:3: UserWarning: a \x1b[2J title")
