"""How CUDA starts for jobs that are pipelines alone."""

from __future__ import annotations

import os

import pytest
from d9d_engine.process_env import ProcessEnv
from d9d_testing.layouts import job_of
from d9d_testing.world import World
from torch import distributed as dist

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"


def queues(schedule: str) -> str | None:
    os.environ.pop(VARIABLE, None)
    values = {
        "run": {"name": "queues"},
        "steps": 1,
        "mesh": {"pp": 2},
        "pipeline": schedule,
        "batch": {"size": 4, "microbatch": 1},
        "model": {"name": "toy_model", "blocks": 4},
        "data": "toy_data",
        "task": "toy_task",
        "optimizer": "toy_optimizer",
    }
    job = job_of(values, ["d9d_testing.toy.plugin", "d9d_pipeline.plugin"])
    with job.joined(ProcessEnv(dist.get_rank(), 2, dist.get_rank(), 2)):
        return os.environ.get(VARIABLE)


@pytest.mark.parametrize(("schedule", "found"), [("1f1b", "2"), ("zero_bubble_v", "2"), ("dual_pipe_v", None)])
def test_streams_share_hardware_queues_unless_pairs_overlap(
    world: type[World], schedule: str, found: str | None
) -> None:
    assert world(2).run(queues, schedule) == [found] * 2
