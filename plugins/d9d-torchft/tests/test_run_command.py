"""The command that trains with several replicas: the replicas' commands, and refusals."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from d9d_core.errors import JobError
from d9d_testing.toy import plugin as toy
from d9d_torchft import supervisor
from d9d_torchft.commands import run
from typer.testing import CliRunner, Result

TOY = str(Path(toy.__file__))
Call = Callable[..., Result]


class Watched:
    """Stand-in of the supervisor, which starts nothing."""

    made: Watched

    def __init__(self, command: Any, names: Sequence[str], restarts: int, say: Any) -> None:
        Watched.made = self
        self.restarts, self.say = restarts, say
        self.commands = {name: command(name) for name in names}

    def run(self) -> int:
        self.say("replica 0 died\x1b[2J")
        return 7


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    """Run the command for a job of the toy model."""
    values = {
        "run": {"name": "mine"},
        "steps": 3,
        "device": "cpu",
        "batch": {"size": 4},
        "model": {"name": "toy_model", "features": 4, "blocks": 1},
        "data": {"name": "toy_data", "features": 4},
        "task": "toy_task",
        "optimizer": "adamw",
    }
    job = tmp_path / "job.json"
    job.write_text(json.dumps(values))
    monkeypatch.setattr(supervisor, "Supervisor", Watched)
    return lambda *words: CliRunner().invoke(run.app, [str(job), "--plugin", TOY, *words])


def test_each_replica_trains_the_job_as_a_run_of_its_own(call: Call, tmp_path: Path) -> None:
    result = call("--set", "parallel=[torchft]")
    assert result.exit_code == 7
    assert result.stdout == ""
    assert "replica 0 died" in result.stderr
    assert "\x1b" not in result.stderr
    shared = ["--set", "parallel=[torchft]", "--plugin", TOY]
    train = [sys.executable, "-m", "d9d_core", "train", str(tmp_path / "job.json"), *shared]
    assert Watched.made.commands == {name: [*train, "--set", f"run.name=mine-{name}"] for name in ("0", "1")}
    assert Watched.made.restarts == 10


def test_a_replica_has_as_many_processes_as_the_mesh(call: Call) -> None:
    mesh = ("--set", "mesh={dp_shard: 2}", "--set", "parallel=[fsdp, torchft]")
    assert call(*mesh, "--replicas", "3", "--max-restarts", "0").exit_code == 7
    assert Watched.made.restarts == 0
    assert list(Watched.made.commands) == ["0", "1", "2"]
    assert all(words[-4:-2] == ["--nproc", "2"] for words in Watched.made.commands.values())


def test_a_job_that_cannot_run_is_refused_before_a_replica_starts(call: Call) -> None:
    problem = call("--set", "parallel=[torchft]", "--set", "batch={size: 3, microbatch: 2}").exception
    assert isinstance(problem, JobError)
    assert str(problem).startswith("--set batch: batch.size 3 on 1 data-parallel rank(s)")


def test_a_job_without_the_strategy_is_refused(call: Call) -> None:
    problem = call().exception
    assert isinstance(problem, JobError)
    assert "the strategy torchft is missing; add it" in str(problem)
