"""``--nproc`` of each command: how many processes it starts, with which arguments, and how it ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import d9d_engine.launch.agent as agent
import d9d_inference.commands.evaluate as evaluation
import pytest
import typer
from d9d_core.errors import JobError
from d9d_engine.cli.train import app as train
from d9d_engine.job import Job
from d9d_inference.commands.infer import app as infer
from d9d_planner.profile.command import app as profile
from typer.testing import CliRunner, Result

Write = Callable[..., Path]


class Started:
    """Stand-in for a launch, which records what it would start."""

    made: list[Started]

    def __init__(
        self,
        arguments: tuple[str, ...],
        processes: int,
        restarts: int,
        name_of: Callable[[int], str],
        patience: float,
        environ: dict[str, str],
        machines: object,
    ) -> None:
        self.arguments, self.processes, self.restarts, self.patience = arguments, processes, restarts, patience
        self.names = [name_of(rank) for rank in range(processes)]
        self.machines = machines
        self.made.append(self)

    def run(self, _interrupts: Any) -> int:
        return 7


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Started]:
    made: list[Started] = []
    monkeypatch.setattr(Started, "made", made, raising=False)
    monkeypatch.setattr(agent, "Launch", Started)
    return made


def run(app: typer.Typer, *arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize(
    ("app", "words", "passed_on"),
    [
        (train, [], ["train", "JOB"]),
        (profile, ["--steps", "13"], ["profile", "JOB", "--steps", "13"]),
        (
            evaluation.app,
            ["--limit", "2", "--checkpoint", "4"],
            ["evaluate", "--checkpoint", "4", "--limit", "2", "--", "JOB"],
        ),
    ],
)
def test_each_process_gets_the_command_without_nproc(
    started: list[Started],
    small_job: Write,
    monkeypatch: pytest.MonkeyPatch,
    app: typer.Typer,
    words: list[str],
    passed_on: list[str],
) -> None:
    job = str(small_job("run", mesh={"dp_shard": 2}, parallel=["fsdp"], timeouts={"startup": 33.0}))
    # There is no run to evaluate.
    monkeypatch.setattr(evaluation, "find_subject", lambda *_: SimpleNamespace(job=Job.load(Path(job))))
    result = run(app, job, "--nproc", "2", *words)
    assert result.exit_code == 7, result.output
    (launch,) = started
    assert list(launch.arguments) == ["-m", "d9d_core", *(job if word == "JOB" else word for word in passed_on)]
    assert (launch.processes, launch.restarts, launch.patience, launch.machines) == (2, 0, 33.0, None)
    assert launch.names == ["rank 0 (dp_shard=0)", "rank 1 (dp_shard=1)"]


def test_processes_started_by_a_launcher_start_no_others(
    started: list[Started], small_job: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = str(small_job("run"))
    numbers = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for name, value in (numbers | {"MASTER_ADDR": "localhost", "MASTER_PORT": "29555"}).items():
        monkeypatch.setenv(name, value)
    for app in (train, profile, evaluation.app, infer):
        result = run(app, job, "--nproc", "2")
        assert isinstance(result.exception, JobError)
        assert "has started this process; use its own options" in str(result.exception)
    assert started == []
