"""Submission of a job to an engine that is a stand-in: its order, its files and its record."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from d9d_core.cli import check
from d9d_core.errors import JobError, LaunchError, PluginError
from d9d_core.launcher import EngineStatus, LaunchRequest, Submission
from d9d_core.plugin import LauncherSpec, Ref
from d9d_launch import engine
from d9d_launch.commands import submit
from d9d_testing.toy import plugin as toy
from typer.testing import CliRunner, Result

pytest.importorskip("d9d_parallel", reason="four processes need a data-parallel strategy")
TOY = str(Path(toy.__file__))
JOB: dict[str, Any] = {
    "run": {"name": "a"},
    "steps": 3,
    "device": "cpu",
    "batch": {"size": 8, "microbatch": 1},
    "model": {"name": "toy_model", "features": 4, "blocks": 1},
    "data": {"name": "toy_data", "features": 4},
    "task": "toy_task",
    "optimizer": "toy_optimizer",
}
Call = Callable[..., Result]


class Box:
    """Stand-in of a launcher; notes the order of the calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.state: Any = "running"

    def require(self) -> None:
        self.calls.append("require")

    def prepare(self, request: LaunchRequest) -> Submission:
        self.calls.append("prepare")
        text = f"{request.name} {request.nodes} {request.processes} {request.device}\n"
        return Submission(files={request.folder / "box.txt": text}, command=("box", *request.command, "a b"))

    def submit(self, submission: Submission) -> str:
        self.calls.append("submit")
        assert all(path.read_text() == text for path, text in submission.files.items())
        return "box-7"

    def status(self, identifier: str, folder: Path, lines: int) -> EngineStatus:
        assert (identifier, folder.name, lines) == ("box-7", "launch", 0)
        return EngineStatus(state=self.state, detail="")


@pytest.fixture
def box(monkeypatch: pytest.MonkeyPatch) -> Box:
    found = Box()
    config = SimpleNamespace(model_dump=lambda mode, exclude: {"mode": mode, "without": sorted(exclude)})

    def configured(_registry: Any, name: str, options: dict[str, Any]) -> Any:
        assert options == {"queue": "short"}
        return config

    monkeypatch.setattr(engine, "engine_config", configured)
    monkeypatch.setattr(engine, "build_launcher", lambda _registry, _name, given: found if given is config else None)
    return found


@pytest.fixture
def call(box: Box, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    """Run the command for a job of the toy model on two machines of two processes; errors of d9d are raised."""
    monkeypatch.chdir(tmp_path)
    Path("job.json").write_text(json.dumps(JOB))
    monkeypatch.setattr(check, "check_job", lambda _job, *size: box.calls.append(f"check {size}"))

    def run(*words: str, name: str = "box") -> Result:
        size = ("--engine", name, "--nodes", "2", "--processes", "2", "--option", "queue=short", "--plugin", TOY)
        result = CliRunner().invoke(submit.app, ["job.json", *size, *words])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run


def test_a_dry_run_needs_no_engine_and_writes_nothing(call: Call, box: Box, tmp_path: Path) -> None:
    shown = call("--dry-run", "--set", "seed=5").output
    folder = tmp_path / "runs" / "a" / "launch"
    assert f"# {folder / 'job.yaml'}\n" in shown
    assert f"# {folder / 'box.txt'}\na 2 2 cpu\n" in shown
    assert shown.endswith(
        f"# command\nbox {sys.executable} -m d9d_core train {folder / 'job.yaml'} --plugin {TOY} 'a b'\n"
    )
    assert "seed: 5" in shown
    assert box.calls == ["check (4, None)", "prepare"]
    assert not (tmp_path / "runs").exists()


def test_a_submission_is_written_submitted_and_recorded_once(call: Call, box: Box, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "a" / "launch"
    said = call("--memory", "1MiB").output
    assert said == f"submitted to box as box-7; to follow it: d9d launch status {Path('runs') / 'a'}\n"
    assert box.calls == ["require", f"check {(4, 2**20)}", "prepare", "submit"]
    record = json.loads((folder / "submission.json").read_text())
    assert (record["engine"], record["identifier"], record["nodes"], record["processes"]) == ("box", "box-7", 2, 2)
    assert record["options"] == {"mode": "json", "without": ["name"]}
    assert record["job"] == str(tmp_path / "job.json")
    assert "dp_shard: 4" in (folder / "job.yaml").read_text()  # the size of the submission
    with pytest.raises(LaunchError, match="was submitted to box as box-7, which is running; cancel that submission"):
        call()
    assert box.calls.count("submit") == 1
    call(name="other")  # the same run in another engine
    call()
    box.state = "failed"
    assert json.loads((folder / "submission.json").read_text())["earlier"] == {}
    (folder.parent / "failed.json").write_text("{}")
    call()
    assert box.calls.count("submit") == 4
    assert list(json.loads((folder / "submission.json").read_text())["earlier"]) == ["failed.json"]


def test_groups_of_tensor_parallelism_are_checked_for_the_machines(call: Call, box: Box) -> None:
    mesh = ("--set", "mesh={tp: 3, dp_shard: 2}", "--set", "parallel=[fsdp, tensor_parallel]", "--set", "batch.size=6")
    with pytest.raises(JobError, match=r"mesh.tp is 3, but each of the 3 machines has 2 processes"):
        call(*mesh, "--nodes", "3")
    assert box.calls == ["require"]
    call(*mesh, "--nodes", "4")  # the check of the job refuses another number of processes
    assert "check (8, None)" in box.calls


def test_an_engine_without_its_library_says_what_to_install() -> None:
    spec = LauncherSpec(
        name="box", summary="Box.", config=Ref("a:b"), build=Ref("a:b"), requires=frozenset({"import:no_box"})
    )
    entry = SimpleNamespace(spec=spec, __str__=lambda: "box")
    registry: Any = SimpleNamespace(find=lambda kind, name: entry if (kind, name) == ("launcher", "box") else None)
    with pytest.raises(PluginError, match=r"needs no_box; install it with: pip install no_box"):
        engine.engine_config(registry, "box", {})
