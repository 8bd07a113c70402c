"""Until stages can be trained, a job that asks for several is refused while it is planned, never trained wrongly."""

from __future__ import annotations

from typing import Any

import pytest
from d9d_core.errors import BuildError
from d9d_testing.layouts import job_of

JOB = {
    "steps": 2,
    "device": "cpu",
    "batch": {"size": 8, "microbatch": 1},
    "model": "toy_model",
    "data": "toy_data",
    "task": "toy_task",
    "optimizer": "toy_optimizer",
    "trackers": [],
    "export": False,
}


@pytest.mark.parametrize(
    ("pipeline", "pp", "stages"), [("1f1b", 2, 2), ({"name": "interleaved_1f1b", "stages_per_rank": 2}, 1, 2)]
)
def test_several_stages_are_refused(pipeline: Any, pp: int, stages: int) -> None:
    job = job_of({**JOB, "pipeline": pipeline, "mesh": {"pp": pp}}, ["d9d_testing.toy.plugin", "d9d_pipeline.plugin"])
    with pytest.raises(BuildError, match=f"runs {stages} stages, and only models in one piece can be trained so far"):
        job.plan()


def test_actions_that_nothing_runs_are_refused() -> None:
    job = job_of({**JOB, "pipeline": "zb1p"}, ["d9d_testing.toy.plugin", "d9d_pipeline.plugin"])
    with pytest.raises(BuildError, match="'zb1p' asks for InputBackward, WeightBackward, which nothing can run so far"):
        job.plan()


def test_one_stage_is_trained_by_any_schedule() -> None:
    job = job_of({**JOB, "pipeline": "1f1b"}, ["d9d_testing.toy.plugin", "d9d_pipeline.plugin"])
    assert job.build(lambda _note: None).train().step == 2
