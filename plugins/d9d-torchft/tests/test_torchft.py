"""Replicas of real processes with torchft's lighthouse: kills, restarts, replicas of two ranks. Needs torchft.

torchft is in an environment of its own, ``.venv-torchft``, which ``.ci/full`` creates.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from d9d_testing.toy import plugin as toy
from safetensors.torch import load_file
from torch import Tensor

ROOT = Path(__file__).resolve().parents[3]
HAS_TORCHFT = importlib.util.find_spec("torchft") is not None
PYTHON = sys.executable if HAS_TORCHFT else str(ROOT / ".venv-torchft/bin/python")
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not Path(PYTHON).exists(), reason="needs torchft: .ci/full creates .venv-torchft"),
]


def job(directory: Path, **sections: Any) -> Path:
    values = {
        "run": {"name": "run", "dir": str(directory / "runs")},
        "steps": 60,
        "device": "cpu",
        "batch": {"size": 16, "microbatch": 2},
        "model": {"name": "toy_model", "features": 8, "blocks": 3, "dropout": 0.1},
        "data": {"name": "toy_data", "features": 8},
        "task": {"name": "toy_task", "decay": 0.01},
        "optimizer": {"name": "adamw", "lr": 0.01},
        "metrics": ["toy_metric"],
        "trackers": [{"name": "jsonl", "picture": False}],
        "logging": {"every": 10},
        "checkpoint": {"every": 20},
        "gradient_clipping": {"max_norm": 0.5},
        "export": False,
        **sections,
    }
    path = directory / "job.json"
    path.write_text(json.dumps(values))
    return path


def started(*arguments: object) -> subprocess.Popen[str]:
    command = [PYTHON, "-m", "d9d_core", *map(str, arguments), "--plugin", str(Path(toy.__file__))]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ)


def final(directory: Path, name: str) -> dict[str, Tensor]:
    newest = sorted((directory / "runs" / name / "checkpoints").glob("step-*"))[-1]
    files = sorted(newest.glob("tensors-*.safetensors"))
    return {f"{index}/{name}": t for index, file in enumerate(files) for name, t in load_file(file).items()}


def logged(directory: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "runs" / name / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("ranks", [1, 2])
def test_replicas_train_like_one_run(tmp_path: Path, ranks: int) -> None:
    layout: dict[str, Any] = {"mesh": {"dp_shard": ranks}} if ranks > 1 else {}
    strategies = ["fsdp"] * (ranks > 1)
    path = job(tmp_path, **layout, parallel=[*strategies, {"name": "torchft", "min_replicas": 2}])
    process = started("torchft", "run", path, "--replicas", 2)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert "2 replicas share the batch: 0, 1" in output
    nproc = ["--nproc", ranks] if ranks > 1 else []
    alone = started("train", path, *nproc, "--set", f"parallel={json.dumps(strategies)}", "--set", "run.name=alone")
    told, _ = alone.communicate(timeout=300)
    assert alone.returncode == 0, told
    first, second, expected = (final(tmp_path, name) for name in ("run-0", "run-1", "alone"))
    for name, tensor in expected.items():
        assert first[name].equal(second[name]), name
        torch.testing.assert_close(first[name], tensor, rtol=1e-5, atol=1e-5, msg=name)
    assert logged(tmp_path, "run-0")[-1]["loss"] == pytest.approx(logged(tmp_path, "alone")[-1]["loss"], rel=1e-4)


def test_a_killed_rank_takes_its_replica_down_and_both_come_back(tmp_path: Path) -> None:
    path = job(tmp_path, steps=600, mesh={"dp_shard": 2}, parallel=["fsdp", "torchft"], checkpoint={"every": 500})
    process = started("torchft", "run", path, "--replicas", 2)
    assert process.stdout is not None
    lines: list[str] = []
    killed = False
    with process.stdout:
        for line in process.stdout:
            lines.append(line.rstrip())
            if "2 replicas share" in line and not killed:
                killed = True
                time.sleep(1)
                os.kill(_rank(process.pid, "run-1"), signal.SIGKILL)
    assert process.wait(timeout=60) == 0, "\n".join(lines)
    text = "\n".join(lines)
    assert "was killed by SIGKILL" in text
    assert re.search(r"^1 ended with status 1; restart 1 of 10$", text, re.MULTILINE), text
    assert "a replica was lost; the step is repeated" in text
    if "took the state of replica 0 after step" in text.split("restart 1 of 10")[1]:
        first, second = final(tmp_path, "run-0"), final(tmp_path, "run-1")
        assert all(tensor.equal(second[name]) for name, tensor in first.items())


def test_a_small_campaign_of_kills_finds_nothing() -> None:
    command = [PYTHON, str(ROOT / "tools/elastic_campaign.py"), "--kill", "3", "--steps", "120", "--gap", "3"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "each with 12 samples, exactly once" in found.stdout
    assert found.stdout.rstrip().endswith("no deviation")


def _rank(parent: int, name: str) -> int:
    """A rank of the named replica, below a process."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().decode(errors="replace")
            environ = (folder / "environ").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if f"run.name={name}" in command and "RANK=1\0" in environ and f"dir={parent}" not in command:
            return int(folder.name)
    raise AssertionError("no rank was found")
