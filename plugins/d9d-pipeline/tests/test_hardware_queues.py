"""Hardware queues of a GPU, as jobs choose their number before CUDA starts."""

from __future__ import annotations

import math
import os

import pytest
from d9d_engine.process_env import ProcessEnv
from d9d_testing.layouts import job_of
from d9d_testing.world import World
from torch import distributed as dist

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"


def queues(schedule: str, mesh: dict[str, int]) -> str | None:
    os.environ.pop(VARIABLE, None)
    values = {
        "run": {"name": "queues"},
        "steps": 1,
        "mesh": mesh,
        "pipeline": schedule,
        "batch": {"size": 8, "microbatch": 1},
        "model": {"name": "toy_model", "blocks": 4},
        "data": "toy_data",
        "task": "toy_task",
        "optimizer": "toy_optimizer",
    }
    job = job_of(values, ["d9d_testing.toy.plugin", "d9d_pipeline.plugin"])
    ranks = dist.get_world_size()
    with job.joined(ProcessEnv(dist.get_rank(), ranks, dist.get_rank(), ranks)):
        return os.environ.get(VARIABLE)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("schedule", "mesh", "found"),
    [
        ("1f1b", {"pp": 2}, "2"),
        ("1f1b", {"pp": 2, "dp_replicate": 2}, None),
        ("zero_bubble_v", {"pp": 2}, None),
        ("dual_pipe_v", {"pp": 2}, None),
    ],
)
def test_streams_share_them_where_ordered_transfers_are_all_that_is_communicated(
    world: type[World], schedule: str, mesh: dict[str, int], found: str | None
) -> None:
    ranks = math.prod(mesh.values())
    assert world(ranks).run(queues, schedule, mesh) == [found] * ranks
