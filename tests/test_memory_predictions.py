"""The tool that compares the planner's predictions for one device with measurements."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
NAMES = ("records", "timing", "random_tokens", "rows", "memory_predictions")


@pytest.mark.slow
def test_a_row_is_predicted_and_trained_and_written(tmp_path: Path) -> None:
    script = str(ROOT / "tools" / "bench" / "memory_predictions.py")
    command = [sys.executable, script, "--tiny", "--rows", "2", "--folder", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("memory-predictions--*.json")
    result = json.loads(path.read_text())
    assert [row["name"] for row in result["predictions"]] == ["tiny 2x64", "tiny-moe 2x64 sgd float32"]
    for row in result["predictions"]:
        assert row["predicted"]["allocated_gib"] > 0
        assert row["measured"]["seconds"] > row["predicted"]["seconds"] > 0  # rates of an H200
    assert len(done.stdout.splitlines()) == 4


@pytest.mark.thorough
def test_every_row_is_a_job_that_is_accepted(room: SimpleNamespace, tmp_path: Path) -> None:
    from d9d_engine.job import Job

    known = room.memory_predictions.registry()
    names = set()
    for row in (*room.memory_predictions.ROWS, *room.memory_predictions.TINY):
        Job.from_values(row.values(str(tmp_path), "cpu"), registry=known).check(1)
        names.add(row.name)
    assert len(names) >= 12 + len(room.memory_predictions.TINY)


def test_a_job_without_a_cost_description_is_measured_all_the_same(room: SimpleNamespace) -> None:
    ahead, found = {"not_predicted": "no cost"}, {"seconds": 1.0, "whole_seconds": 2.0}
    line = room.memory_predictions.line_of(3, room.memory_predictions.ROWS[0], ahead, found)
    assert "not predicted: no cost" in line
    assert "1000 ms" in line
    rows = [{"predicted": ahead, "measured": found}, {"predicted": _side(1, 1), "measured": None}]
    assert room.memory_predictions.summary(rows) == {}


def _side(seconds: float, gib: float) -> dict[str, Any]:
    return {"seconds": seconds, "allocated_gib": gib}


def test_the_summary_has_the_largest_errors_with_their_signs_and_the_correlation_of_ranks(
    room: SimpleNamespace,
) -> None:
    rows = [
        {"predicted": _side(1.1, 8.0), "measured": _side(1.0, 10.0)},
        {"predicted": _side(2.0, 11.0), "measured": _side(4.0, 10.0)},
        {"predicted": _side(9.0, 10.0), "measured": {"failed": "out of memory"}},
    ]
    found = room.memory_predictions.summary(rows)
    assert found["largest_memory_error"] == pytest.approx(-0.2)
    assert found["largest_time_error"] == pytest.approx(-0.5)
    assert found["median_memory_error"] == pytest.approx(0.15)
    assert found["spearman"] == pytest.approx(1.0)


def test_ranks_are_compared_and_equal_values_share_theirs(room: SimpleNamespace) -> None:
    spearman = room.memory_predictions.spearman
    assert spearman([1, 2, 3, 4], [1, 4, 9, 16]) == pytest.approx(1.0)
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1.0)
    assert spearman([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(0.9486832980505138)
    assert spearman([1, 1], [1, 2]) is None
