"""Strategies and schedules whose axes have one rank each: a warning in `check` and at the start of a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Command = Callable[..., tuple[int, str, str]]
ALONE = "has no effect, because "


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (
            {"parallel": ["replicate"]},
            "parallel[0]: strategy 'replicate' has no effect, because mesh.dp_replicate is 1",
        ),
        ({"parallel": ["compile", "tensor_parallel"]}, "parallel[1]: strategy 'tensor_parallel' has no effect"),
        (
            {"pipeline": "1f1b"},
            "pipeline: schedule '1f1b' has no effect, because mesh.pp is 1; give it more ranks",
        ),
    ],
)
def test_a_part_that_splits_nothing_is_told(
    d9d: Command, small_job: Callable[..., Path], sections: dict[str, Any], said: str
) -> None:
    path = small_job(**sections)
    status, out, err = d9d("check", str(path))
    assert status == 0, err
    assert said in " ".join(out.split())


@pytest.mark.thorough
def test_a_run_says_so_at_its_start(d9d: Command, small_job: Callable[..., Path]) -> None:
    status, out, err = d9d("train", str(small_job(parallel=["replicate"], steps=1, checkpoint={}, lr_schedule=None)))
    assert status == 0, err
    assert "warning: parallel[0]: strategy 'replicate' has no effect" in out + err


@pytest.mark.parametrize(
    "sections",
    [
        {"parallel": ["compile", "activation_checkpointing"]},
        {"parallel": ["fsdp"], "mesh": {"dp_shard": 2}},
        {"parallel": ["hsdp"], "mesh": {"dp_replicate": 2, "dp_shard": 1}},
        {"pipeline": "1f1b", "mesh": {"pp": 2}},
    ],
)
def test_parts_that_split_or_have_no_axis_are_no_news(
    d9d: Command, small_job: Callable[..., Path], sections: dict[str, Any]
) -> None:
    status, out, err = d9d("check", str(small_job(**sections)))
    assert status == 0, err
    assert ALONE not in out + err
