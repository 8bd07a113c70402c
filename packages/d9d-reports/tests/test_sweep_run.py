"""Runs of a sweep over time: how many at once, with which arguments, and how signals end them. No real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, cast

import pytest
from d9d_engine.job import Job
from d9d_reports.runs import sweep as module
from d9d_reports.runs.grid import SweepRun
from d9d_reports.runs.sweep import Sweep


class World:
    """Processes that live for a number of pauses, and signals that arrive after a number of pauses.

    Attributes:
        lives: name of a run -> pauses until it ends.
        signals: pause -> signal that arrives in it.
        said: last line that each process writes, at its start.
        events: starts, signals and pauses, in order.
        started: arguments and options of each process.
    """

    def __init__(self, lives: dict[str, int], signals: dict[int, int] | None = None) -> None:
        self.lives, self.signals = lives, signals or {}
        self.said = "finished in 3 s"
        self.events: list[str] = []
        self.started: list[tuple[list[str], dict[str, Any]]] = []
        self.received: list[int] = []
        self.processes: dict[int, Process] = {}

    @contextmanager
    def signals_received(self) -> Iterator[list[int]]:
        yield self.received

    def sleep(self, _seconds: float) -> None:
        self.events.append("pause")
        if (number := self.signals.get(self.events.count("pause"))) is not None:
            self.received.append(number)

    def killpg(self, group: int, number: int) -> None:
        process = self.processes[group]
        if number == signal.SIGKILL and process.returncode is None:
            self.events.append(f"kill {process.name}")
            process.returncode = -number


class Process:
    """Stand-in of ``d9d train``: ends by itself, or two pauses after SIGTERM."""

    def __init__(self, world: World, arguments: list[str], **options: Any) -> None:
        self.world, self.pid, self.returncode = world, 1000 + len(world.started), cast("int | None", None)
        self.name = next(word for word in arguments if word.startswith("run.name=")).partition("=")[2]
        world.started.append((arguments, options))
        world.processes[self.pid] = self
        world.events.append(f"start {self.name}")
        self.end_at = world.events.count("pause") + world.lives[self.name]
        output = cast("IO[bytes]", options["stdout"])
        output.write(f"this is {self.name}\n{world.said}\n".encode())
        output.flush()

    def poll(self) -> int | None:
        if self.returncode is None and self.world.events.count("pause") >= self.end_at:
            self.returncode = 0
        return self.returncode

    def send_signal(self, number: int) -> None:
        self.world.events.append(f"{signal.Signals(number).name} {self.name}")
        self.end_at = self.world.events.count("pause") + 2

    def wait(self) -> int | None:
        return self.returncode


def runs_of(directory: Path, *names: str) -> list[SweepRun]:
    def job(name: str) -> Job:
        return cast("Job", SimpleNamespace(run=SimpleNamespace(directory=directory / "all" / name)))

    return [SweepRun(name, (f"run.name={name}",), job(name)) for name in names]


def sweep_in(
    monkeypatch: pytest.MonkeyPatch, world: World, runs: list[SweepRun], jobs: int, *options: str
) -> tuple[Sweep, list[str]]:
    said: list[str] = []
    monkeypatch.setattr(SweepRun, "is_finished", lambda self: self.name == "done")
    stand_in = SimpleNamespace(
        Popen=lambda arguments, **given: Process(world, arguments, **given),
        DEVNULL=subprocess.DEVNULL,
        STDOUT=subprocess.STDOUT,
    )
    monkeypatch.setattr(module, "subprocess", stand_in)
    monkeypatch.setattr(module, "signals_received", world.signals_received)
    monkeypatch.setattr(module, "time", SimpleNamespace(sleep=world.sleep))
    monkeypatch.setattr(os, "killpg", world.killpg)
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return Sweep(runs, ["train", "job.yaml"], options, jobs, said.append), said


def test_waiting_runs_start_as_soon_as_others_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World({"a": 3, "b": 1, "c": 1})
    sweep, said = sweep_in(monkeypatch, world, runs_of(tmp_path, "a", "done", "b", "c"), 2)
    assert sweep.run() is False
    assert world.events == ["start a", "start b", "pause", "pause", "start c", "pause", "pause"]
    assert sweep.endings == {"a": "finished", "done": "skipped", "b": "finished", "c": "finished"}
    log = tmp_path / "all"
    assert said == [
        f"a: started, output in {log / 'a.log'}", f"b: started, output in {log / 'b.log'}", "b: finished",
        f"c: started, output in {log / 'c.log'}", "a: finished", "c: finished",
    ]  # fmt: skip


def test_a_run_is_a_session_of_its_own_with_its_part_of_the_processors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World({"a": 1})
    sweep, _ = sweep_in(monkeypatch, world, runs_of(tmp_path, "a"), 2, "--no-plugins")
    sweep.run()
    ((arguments, options),) = world.started
    assert arguments[-7:] == ["-m", "d9d_core", "train", "job.yaml", "--set", "run.name=a", "--no-plugins"]
    assert Path(arguments[0]).name == Path(sys.executable).name
    assert (options["stdin"], options["stderr"]) == (subprocess.DEVNULL, subprocess.STDOUT)
    assert options["start_new_session"] is True
    assert options["preexec_fn"] is module._end_with_parent
    assert options["env"]["OMP_NUM_THREADS"] == "3"
    assert options["stdout"].closed


@pytest.mark.parametrize(("jobs", "options"), [(1, ()), (2, ("--nproc", "2"))])
def test_threads_are_left_to_a_run_that_is_alone_or_has_a_number_of_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: int, options: tuple[str, ...]
) -> None:
    world = World({"a": 1})
    sweep, _ = sweep_in(monkeypatch, world, runs_of(tmp_path, "a"), jobs, *options)
    sweep.run()
    assert "OMP_NUM_THREADS" not in world.started[0][1]["env"]


def test_a_chosen_number_of_threads_is_kept_and_there_is_at_least_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for chosen in ("5", None):
        world = World({"a": 1})
        sweep, _ = sweep_in(monkeypatch, world, runs_of(tmp_path, "a"), 8)
        if chosen:
            monkeypatch.setenv("OMP_NUM_THREADS", chosen)
        sweep.run()
        found.append(world.started[0][1]["env"]["OMP_NUM_THREADS"])
    assert found == ["5", "1"]


def test_only_the_output_of_this_start_tells_how_a_run_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World({"a": 1})
    runs = runs_of(tmp_path, "a")
    (tmp_path / "all").mkdir()
    log = tmp_path / "all" / "a.log"
    log.write_text("a\nfinished earlier\nb\nc\nd\n")
    sweep, _ = sweep_in(monkeypatch, world, runs, 1)
    sweep.run()
    assert sweep.endings == {"a": "finished"}
    assert log.read_text() == "a\nfinished earlier\nb\nc\nd\nthis is a\nfinished in 3 s\n"
    world.said = "nothing"
    sweep.run()
    assert sweep.endings == {"a": "interrupted"}


def test_the_first_signal_lets_active_runs_save_and_starts_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World({"a": 9, "b": 9, "c": 1}, {2: signal.SIGINT})
    sweep, _ = sweep_in(monkeypatch, world, runs_of(tmp_path, "a", "b", "c"), 2)
    assert sweep.run() is True
    assert world.events == [
        "start a", "start b", "pause", "pause", "SIGTERM a", "SIGTERM b", "pause", "pause", "pause",
    ]  # fmt: skip
    assert sweep.endings == {"a": "finished", "b": "finished", "c": "not started"}


def test_the_second_signal_kills_active_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World({"a": 9, "b": 9}, {1: signal.SIGTERM, 2: signal.SIGTERM})
    sweep, _ = sweep_in(monkeypatch, world, runs_of(tmp_path, "a", "b"), 1)
    assert sweep.run() is True
    assert world.events == ["start a", "pause", "SIGTERM a", "pause", "kill a", "pause"]
    assert sweep.endings == {"a": "interrupted", "b": "not started"}
    assert sweep.errors == {}


def test_an_error_of_the_sweep_kills_its_active_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World({"a": 9, "b": 9})
    sweep, _ = sweep_in(monkeypatch, world, runs_of(tmp_path, "a", "b"), 2)

    def say(_line: str) -> None:
        if len(world.started) == 2:
            raise OSError("no space for a line")

    sweep.say = say
    with pytest.raises(OSError, match="no space for a line"):
        sweep.run()
    assert world.events == ["start a", "start b", "kill a", "kill b"]
    assert all(options["stdout"].closed for _, options in world.started)


def test_the_kernel_ends_a_run_whose_sweep_was_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    library = SimpleNamespace(prctl=lambda option, number: asked.append((option, number)))
    monkeypatch.setattr(module, "ctypes", SimpleNamespace(CDLL=lambda _name: library))
    monkeypatch.setattr(sys, "platform", "linux")
    module._end_with_parent()
    assert asked == [(1, signal.SIGTERM)]
    monkeypatch.setattr(sys, "platform", "darwin")
    module._end_with_parent()
    assert asked == [(1, signal.SIGTERM)]
