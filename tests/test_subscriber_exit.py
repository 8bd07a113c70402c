"""A subscriber that wants to end one rank: all ranks finish the same step, save and fail."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from d9d_core import events as ev
from d9d_core.errors import TrainingError
from d9d_engine.run.directory import read_failure
from d9d_testing.layouts import job_of, topology_here
from d9d_testing.world import World
from torch import distributed as dist

PLUGINS = ["d9d_nn.plugin", "d9d_data.plugin", "d9d_optim.plugin", "d9d_parallel.plugin", "d9d_qwen3.plugin"]


class Exits:
    """Ends its process after the third step."""

    def subscriptions(self) -> Any:
        return [(ev.StepEnds, self.handle)]

    def handle(self, event: ev.StepEnds) -> None:
        if event.step == 2:
            raise SystemExit(0)


def train(values: dict[str, Any], rank: int) -> list[Any]:
    job = job_of(values, PLUGINS)
    observers = [Exits()] if dist.get_rank() == rank else []
    trainer = job.build(lambda _: None, topology_here(job), observers=observers)
    try:
        status: str = trainer.train().status
    except TrainingError as error:
        status = str(error)
    dist.barrier()
    failure = read_failure(trainer.job.run.directory)
    return [status, trainer.checkpointer.store.steps(), None if failure is None else failure.error]


@pytest.mark.thorough
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.full), 1])
def test_all_ranks_save_and_fail_when_a_subscriber_exits_on_one(
    world: type[World], small_job: Callable[..., Path], tmp_path: Path, rank: int
) -> None:
    path = small_job("exits", steps=8, mesh={"dp_replicate": 2}, parallel=["replicate"], checkpoint={}, export=False)
    found = world(2).run(train, json.loads(path.read_text()), rank)
    assert "test_subscriber_exit.py" in found[rank][0]
    assert "raised SystemExit(0), which would end the process" in found[rank][0]
    assert found[1 - rank][0] == f"rank {rank} (dp_replicate={rank}): {found[rank][0]}"
    assert found[rank][1] == found[1 - rank][1] == [4]
    assert found[rank][0] in found[0][2], "the outcome is a failure, on whichever rank"
    assert not list(tmp_path.rglob("stopped.json"))
