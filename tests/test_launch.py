"""``d9d launch`` with an engine of a single-file plugin, which records its calls."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from d9d_core.errors import D9dError
from d9d_core.job_file.document import Document
from d9d_launch.commands import cancel, status, submit
from typer.testing import CliRunner, Result

ENGINE = '''
import json
import os
from pathlib import Path
from typing import Literal

from d9d_core.config import PluginConfig
from d9d_core.errors import LaunchError
from d9d_core.launcher import EngineStatus, Submission
from d9d_core.plugin import LauncherSpec, Ref, hookimpl

D9D_API = 2


class BoxConfig(PluginConfig):
    """Box."""

    name: Literal["box"] = "box"
    """Selects this launcher."""
    queue: str = "long"
    """Queue."""
    absent: bool = False
    """Whether the engine is missing."""


class Box:
    def __init__(self, config):
        self.config = config

    def require(self):
        if self.config.absent:
            raise LaunchError("box: not installed; install it")

    def prepare(self, request):
        text = f"{self.config.queue} {request.nodes} {request.processes} {request.name} {request.device}\\n"
        files = {request.folder / "box.txt": text}
        return Submission(files=files, command=("box", *request.command))

    def submit(self, submission):
        folder = next(iter(submission.files)).parent
        (folder / "state").write_text("waiting")
        return "box-7"

    def status(self, identifier, folder, lines):
        log = tuple(["a line"][:lines])
        return EngineStatus(state=(folder / "state").read_text(), detail=f"{identifier} {self.config.queue}", log=log)

    def cancel(self, identifier):
        return f"cancelled {identifier} of {self.config.queue}"


@hookimpl
def d9d_launchers():
    config, build = Ref(f"{__name__}:BoxConfig"), Ref(f"{__name__}:Box")
    yield LauncherSpec(name="box", summary="For a test.", config=config, build=build)
'''
JOB = {
    "run": {"name": "a"},
    "steps": 3,
    "batch": {"size": 8, "microbatch": 1},
    "model": {
        "name": "qwen3",
        "vocab_size": 512,
        "hidden_size": 32,
        "num_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "intermediate_size": 64,
        "max_positions": 32,
    },
    "task": "causal_lm",
    "data": {"name": "certificate_tokens", "vocab_size": 512, "sequence_length": 32},
    "optimizer": "adamw",
    "device": "cpu",
}
SIZE = ["--engine", "box", "--nodes", "2", "--processes", "2"]
Launch = Callable[..., Result]


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launch:
    """Run a command of ``d9d launch`` with the engine ``box``; errors of d9d are raised."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "engine.py").write_text(ENGINE)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(JOB))
    apps = {"submit": submit.app, "status": status.app, "cancel": cancel.app}

    def run(command: str, *words: str) -> Result:
        result = CliRunner().invoke(apps[command], [*words, "--plugin", "engine.py"])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run


@pytest.mark.thorough
def test_a_dry_run_prints_files_and_command_and_writes_nothing(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_TOKEN", "secret-of-the-shell")
    shown = launch("submit", "job.yaml", *SIZE, "--dry-run", "--option", "absent=true", "--set", "seed=5").output
    folder = tmp_path / "runs" / "a" / "launch"
    assert f"# {folder / 'box.txt'}\nlong 2 2 a cpu\n" in shown
    assert f"# command\nbox {sys.executable} -m d9d_core train {folder / 'job.yaml'} --plugin" in shown
    assert "seed: 5" in shown
    assert "dp_shard: 4" in shown
    assert "secret-of-the-shell" not in shown
    assert not (tmp_path / "runs").exists()


@pytest.mark.thorough
def test_a_submission_is_recorded_followed_and_cancelled(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "box.yaml").write_text("queue: short\n")
    options = ["--options", "box.yaml"]
    assert "submitted to box as box-7" in launch("submit", "job.yaml", *SIZE, *options, "--set", "seed=5").output
    folder = tmp_path / "runs" / "a" / "launch"
    assert (folder / "box.txt").read_text() == "short 2 2 a cpu\n"
    copy = Document.read(folder / "job.yaml").values
    assert (copy["seed"], copy["mesh"]["dp_shard"]) == (5, 4)
    record = json.loads((folder / "submission.json").read_text())
    assert (record["identifier"], record["options"]["queue"], record["nodes"]) == ("box-7", "short", 2)
    with pytest.raises(D9dError, match="this run was submitted to box as box-7, which is waiting; cancel"):
        launch("submit", "job.yaml", *SIZE)
    assert launch("status", "job.yaml").output.splitlines() == [
        "box box-7: waiting (box-7 short); 2 x 2 processes",
        "last lines of the log:",
        "  a line",
    ]
    assert launch("cancel", "runs/a", "--engine", "box").output == "box box-7: cancelled box-7 of short\n"
    (folder / "state").write_text("failed")
    assert launch("status", "runs/a", "--lines", "0").exit_code == 1
    assert "submitted to box as box-7" in launch("submit", "job.yaml", *SIZE).output  # after the end


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--engine", "bxo"], "--engine bxo: unknown launcher 'bxo'.*install the one that offers it"),
        (["--engine", "box", "--option", "quue=a"], "--option quue: not a field of the engine 'box'.*'queue'"),
        (["--engine", "box", "--option", "absent=5"], "--option absent: input should be a valid boolean.*got '5'"),
        (["--engine", "box", "--option", "absent=true"], "box: not installed; install it"),
        ([*SIZE, "--set", "mesh={dp_shard: 3}", "--set", "parallel=[fsdp]"], "mesh"),
        (
            [
                "--engine",
                "box",
                "--nodes",
                "2",
                "--processes",
                "3",
                "--set",
                "mesh={tp: 2, dp_shard: 3}",
                "--set",
                "batch.size=6",
                "--set",
                "parallel=[fsdp, tensor_parallel]",
            ],
            "mesh.tp is 2, but each of the 2 machines has 3 processes.*use a tp that divides 3 \\(1, 3\\), or start",
        ),
        ([*SIZE, "--processes", "3"], "batch.size 8 cannot be split over 6 data-parallel ranks"),
        ([*SIZE, "--memory", "10MiB"], "this job needs 1.0 GiB on a device"),
    ],
)
def test_nothing_is_submitted_if_engine_options_mesh_or_memory_are_wrong(
    launch: Launch, tmp_path: Path, words: list[str], message: str
) -> None:
    with pytest.raises(D9dError, match=f"(?s){message}"):
        launch("submit", "job.yaml", *words)
    assert not (tmp_path / "runs").exists()
