"""Command ``d9d train`` before a job is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from d9d_core.errors import JobError
from d9d_engine.cli import train
from d9d_engine.launch.agent import Machines
from d9d_engine.run.interrupt import Interrupts
from typer.testing import CliRunner


@pytest.fixture
def invoked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[list[Any], Any]]:
    """Runs the command with stand-ins for the launcher; returns what happened, and the result."""

    def run(*words: str, launcher: str | None = None) -> tuple[list[Any], Any]:
        happened: list[Any] = []

        def launch(_job: object, command: list[str], restarts: int, _interrupts: object, machines: object) -> int:
            happened.append(("launch", command, restarts, *[machines] * (machines is not None)))
            return 7

        def processes(_load: object, nproc: str | None, nodes: int) -> str:
            happened.append(("processes", nproc, *[nodes] * (nodes > 1)))
            return "job"

        def process(_environ: object, alone: bool, _machines: object) -> Any:
            happened.append(("alone", alone))
            return SimpleNamespace(launcher=launcher)

        monkeypatch.setattr(train, "output_is_incidental", lambda: happened.append("incidental"))
        monkeypatch.setattr(train, "process_of_launcher", process)
        monkeypatch.setattr(train, "for_processes", processes)
        monkeypatch.setattr(train, "launch", launch)
        path = tmp_path / "job.yaml"
        path.write_text("")
        return happened, CliRunner().invoke(train.app, [str(path), *words])

    return run


def test_output_is_incidental_before_anything_else_and_restarts_are_counted(invoked: Any, tmp_path: Path) -> None:
    happened, result = invoked("--nproc", "2", "--set", "seed=1")
    command = ["train", str(tmp_path / "job.yaml"), "--set", "seed=1"]
    assert happened == ["incidental", ("alone", False), ("processes", "2"), ("launch", command, 0)]
    assert result.exit_code == 7
    happened, _ = invoked("--max-restarts", "3", "--alone")
    assert happened[:3] == ["incidental", ("alone", True), ("processes", None)]
    assert happened[3][2] == 3


def test_processes_of_several_machines_are_started_on_each(invoked: Any, tmp_path: Path) -> None:
    several = ("--nodes", "3", "--node-rank", "1", "--master")
    happened, result = invoked("--nproc", "2", *several, "node-a:77")
    assert result.exit_code == 7
    assert happened[2:] == [
        ("processes", "2", 3), ("launch", ["train", str(tmp_path / "job.yaml")], 0, Machines(3, 1, "node-a", 77)),
    ]  # fmt: skip
    for master, machines in {
        "node-a": Machines(3, 1, "node-a", 29500), "fe80::1": Machines(3, 1, "fe80::1", 29500),
        "[fe80::1]:5": Machines(3, 1, "fe80::1", 5), "10.0.0.1:5": Machines(3, 1, "10.0.0.1", 5),
    }.items():  # fmt: skip
        assert invoked("--nproc", "2", *several, master)[0][-1][-1] == machines


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--nodes", "2", "--nproc", "1"), "--node-rank and --master are missing"),
        (("--master", "a", "--node-rank", "0", "--nproc", "1"), "--nodes is missing"),
        (("--nodes", "1", "--node-rank", "0", "--master", "a"), "leave out --nodes"),
        (("--nodes", "2", "--node-rank", "2", "--master", "a"), "give 0 to 1, a different one on each machine"),
        (("--nodes", "2", "--node-rank", "0", "--master", ":5"), "is not HOST or HOST:PORT"),
        (("--nodes", "2", "--node-rank", "0", "--master", "a:99999"), "is not HOST or HOST:PORT"),
        (("--nodes", "2", "--node-rank", "0", "--master", "a:b"), "is not HOST or HOST:PORT"),
        (("--nodes", "2", "--node-rank", "0", "--master", "a", "--max-restarts", "1"), "cannot start again together"),
        (("--nodes", "2", "--node-rank", "0", "--master", "a", "--alone"), "leave out --alone"),
    ],
)
def test_wrong_options_of_several_machines_are_errors(invoked: Any, words: tuple[str, ...], said: str) -> None:
    _, result = invoked(*words)
    assert isinstance(result.exception, JobError)
    assert said in str(result.exception)


def test_processes_of_another_launcher_are_not_launched_again(invoked: Any) -> None:
    happened, result = invoked("--nproc", "2", launcher="torchrun")
    assert happened == ["incidental", ("alone", False)]
    assert isinstance(result.exception, JobError)
    assert "torchrun has started this process" in str(result.exception)


@pytest.mark.parametrize(
    ("status", "is_main", "told"), [("finished", True, True), ("finished", False, False), ("stopped", True, False)]
)
def test_the_first_rank_of_a_finished_run_says_where_its_results_are(
    monkeypatch: pytest.MonkeyPatch, status: str, is_main: bool, told: bool
) -> None:
    given: list[Any] = []
    said: list[str] = []
    outcome = SimpleNamespace(status=status, step=12)

    def build(**options: Any) -> Any:
        given.append(options)
        return SimpleNamespace(train=lambda: outcome)

    job = SimpleNamespace(build=build, run=SimpleNamespace(directory="runs/a"))
    topology = SimpleNamespace(is_main=is_main)

    @contextmanager
    def joined(*_: Any) -> Iterator[Any]:
        yield job, topology, "start", True

    monkeypatch.setattr(train, "joined_process", joined)
    monkeypatch.setattr(train, "echo", said.append)
    interrupts = Interrupts()
    ended = train._train(SimpleNamespace(stop_status=75), interrupts, lambda: job)  # type: ignore[arg-type, return-value]
    assert ended == (75 if status == "stopped" else 0)
    assert given == [{"topology": topology, "observers": ["start"], "interrupts": interrupts, "owning": True}]
    assert said == (["finished 12 steps; results in runs/a"] if told else [])
