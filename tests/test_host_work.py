"""A training step makes no more calls on the host than recorded: a GPU with short kernels waits for these calls."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RECORDED: Mapping[str, Mapping[str, int]] = json.loads((ROOT / "tests" / "host_work.json").read_text())
#: Largest ratio of a count to the recorded one, and smallest one, below which the record is no longer a limit.
MOST, LEAST = 1.02, 0.9
HINT = "if this is right, record it: uv run python tools/bench/host_work.py --write"


@pytest.fixture(scope="module")
def counted() -> Mapping[str, Mapping[str, int]]:
    """Counts of this source, from a process whose compiler no other test has used."""
    command = [sys.executable, str(ROOT / "tools" / "bench" / "host_work.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: Mapping[str, Mapping[str, int]] = json.loads(done.stdout)
    return found


def problems(found: Mapping[str, int], recorded: Mapping[str, int]) -> list[str]:
    said = []
    for name, before in recorded.items():
        if found[name] > before * MOST:
            said.append(f"{found[name]} {name} in a step, {before} before")
        elif found[name] < before * LEAST:
            said.append(f"only {found[name]} {name} in a step, {before} before; {HINT}")
    return said


@pytest.mark.thorough
@pytest.mark.parametrize("job", RECORDED)
def test_a_step_makes_no_more_calls_than_recorded(counted: Mapping[str, Mapping[str, int]], job: str) -> None:
    assert counted.keys() == RECORDED.keys()
    assert problems(counted[job], RECORDED[job]) == [], HINT


def test_more_and_far_fewer_calls_are_told() -> None:
    recorded = {"ops": 100, "graph breaks": 0}
    assert problems({"ops": 102, "graph breaks": 0}, recorded) == []
    assert problems({"ops": 103, "graph breaks": 1}, recorded) == [
        "103 ops in a step, 100 before", "1 graph breaks in a step, 0 before",
    ]  # fmt: skip
    assert problems({"ops": 89, "graph breaks": 0}, recorded) == [f"only 89 ops in a step, 100 before; {HINT}"]
