"""Command line of a launch: `--nproc` starts the same command, and what cannot start is one message without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import d9d_testing.toy.plugin as toy
import pytest


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
    recorded = json.loads((tmp_path / "runs/toy/startup.json").read_text())["command"]
    assert recorded.startswith("d9d train job.json --no-plugins --plugin ")
    assert recorded.endswith(" --nproc auto --max-restarts 1 --set steps=2")
    assert "Traceback" not in result.stderr
    assert "arning" not in result.stderr


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("arguments", "environ", "text"),
    [
        (["--nproc", "3", "--set", "mesh.pp=1"], {}, "mesh: one process = 1 rank, but the job was started with 3"),
        (
            ["--nproc", "2", "--set", "mesh.pp=2", "--set", "optimizer.lrr=1"],
            {},
            "optimizer.lrr: not a field of 'toy_optimizer'",
        ),
        (["--nproc", "-1"], {}, "--nproc: '-1' is not a number of processes; give 1 or more, or auto"),
        (["--nproc", "many"], {}, "--nproc: 'many' is not a number of processes; give 1 or more, or auto"),
        (
            ["--set", "mesh.dp_shard=2"],
            {},
            "change mesh or start 2 processes (d9d train --nproc 2, torchrun, or srun)",
        ),
        (
            ["--nproc", "2"],
            {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
            "--nproc, --max-restarts: torchrun has started this process; use its own options",
        ),
        (
            [],
            {"RANK": "0"},
            "RANK is set, but WORLD_SIZE is not; set both of them, or all variables that torchrun sets",
        ),
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
