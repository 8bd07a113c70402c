"""Commands about a submission: their questions to its engine, and their output."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from d9d_core.launcher import EngineStatus
from d9d_launch import engine
from d9d_launch.commands import cancel, status
from d9d_launch.record import FOLDER, SubmissionRecord, digest_of
from typer.testing import CliRunner, Result

Call = Callable[..., Result]


class Box:
    """Stand-in of a launcher that records its calls."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.state: Any = "running"

    def status(self, identifier: str, folder: Path, lines: int) -> EngineStatus:
        self.asked.append((identifier, folder, lines))
        return EngineStatus(state=self.state, detail="RUNNING", log=tuple(["a\x1b[2J line"][:lines]))

    def cancel(self, identifier: str) -> str:
        self.asked.append((identifier,))
        return "saves and stops"


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Box:
    """Launcher of a run that was submitted as ``12``, in ``runs/a`` of the current directory."""
    monkeypatch.chdir(tmp_path)
    job, folder, found = tmp_path / "job.yaml", tmp_path / "runs" / "a" / FOLDER, Box()
    job.write_text("run: {name: a}\nsteps: 10\n")
    folder.mkdir(parents=True)
    SubmissionRecord(
        engine="box",
        options={"queue": "ci"},
        identifier="12",
        nodes=2,
        processes=8,
        job=str(job),
        digest=digest_of(job),
        command=["box"],
        time="2026-01-01T00:00:00+00:00",
    ).write(folder)

    def built(_registry: Any, name: str, config: Any) -> Box:
        assert (name, config) == ("box", {"queue": "ci"})
        return found

    monkeypatch.setattr(engine, "engine_config", lambda _registry, name, options: dict(options))
    monkeypatch.setattr(engine, "build_launcher", built)
    return found


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Calls that look for plugins, which find none."""
    calls: list[tuple[Any, ...]] = []

    def discover(*words: Any) -> Any:
        calls.append(words)
        return SimpleNamespace()

    for module in (cancel, status):
        monkeypatch.setattr(module, "discover_plugins", discover)
    return calls


def test_the_state_and_the_last_ten_lines_of_a_submission_are_shown(
    box: Box, plugins: list[tuple[Any, ...]], tmp_path: Path
) -> None:
    runner = CliRunner()
    result = runner.invoke(status.app, ["job.yaml"])
    assert result.exit_code == 0
    assert result.output.splitlines() == [
        "box 12: running (RUNNING); 2 x 8 processes", "last lines of the log:", "  a\\x1b[2J line",
    ]  # fmt: skip
    assert [one[2] for one in box.asked] == [10]
    assert "log" not in runner.invoke(status.app, ["runs/a", "--lines", "0", "--engine", "box"]).output
    identifier, folder, lines = box.asked[-1]
    assert (identifier, folder.resolve(), lines) == ("12", tmp_path / "runs" / "a" / FOLDER, 0)
    assert runner.invoke(status.app, ["job.yaml", "--lines", "-1"]).exit_code == 2
    box.state = "failed"
    assert runner.invoke(status.app, ["job.yaml", "--no-plugins", "--plugin", "mine.py"]).exit_code == 1
    assert plugins == [([], False), ([], False), ([Path("mine.py")], True)]


def test_a_cancelled_submission_is_told_what_its_run_does(box: Box, plugins: list[tuple[Any, ...]]) -> None:
    runner = CliRunner()
    assert runner.invoke(cancel.app, ["runs/a"]).output == "box 12: saves and stops\n"
    assert runner.invoke(cancel.app, ["job.yaml", "--set", "run.name=b"]).exit_code == 1  # another run
    assert box.asked == [("12",)]
    runner.invoke(cancel.app, ["job.yaml", "--no-plugins", "--plugin", "mine.py", "--engine", "box"])
    assert box.asked == [("12",), ("12",)]
    assert plugins == [([], False), ([Path("mine.py")], True)]
