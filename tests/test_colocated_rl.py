"""The example of reinforcement learning: the reward rises, and an interrupted run goes on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[1] / "examples" / "colocated_rl" / "train.py"


def train(directory: Path, *overrides: str) -> list[str]:
    command = [sys.executable, str(EXAMPLE), "device=cpu", *overrides]
    done = subprocess.run(command, check=False, cwd=directory, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.full
def test_the_reward_rises_and_the_run_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    train(tmp_path, "steps=20")
    lines = train(tmp_path, "steps=30")
    assert "resumed at step 20 of 30" in lines
    assert len(list((tmp_path / "runs" / "rollouts").iterdir())) == 30
    first, last = (float(word) for word in lines[-1].split() if word.startswith("0."))
    assert first > 0.15  # after 20 steps
    assert last > first
    assert (tmp_path / "runs" / "counting" / "model" / "model.safetensors").exists()
