from __future__ import annotations

from pathlib import Path

import pytest
from d9d_core.registry.loader import discover
from d9d_core.registry.policy import PluginPolicy
from d9d_engine.job import Job
from d9d_testing.toy import plugin as toy
from d9d_testing.world import World


def step_together(directory: str) -> list[float]:
    job = Job.from_values(
        {
            "run": {"name": "toy", "dir": directory}, "steps": 6, "device": "cpu", "mesh": {"dp_replicate": 2},
            "batch": {"size": 8, "microbatch": 2}, "model": "toy_model", "data": "toy_data", "task": "toy_task",
            "optimizer": "toy_optimizer", "parallel": ["replicate"], "trackers": [], "export": False,
            "evaluation": {"every": 6, "packs": 1, "data": "toy_data"},
        },
        registry=discover(PluginPolicy(files=(Path(toy.__file__),))),
    )  # fmt: skip
    with job.joined() as topology, job.build(lambda _note: None, topology) as trainer:
        losses = [result.loss.item() for result in trainer.steps(3)]
        losses.append(trainer.evaluate()["eval/loss"])
        trainer.save()
        return losses + [result.loss.item() for result in trainer.steps(2)]


@pytest.mark.full
def test_ranks_step_together(world: type[World], tmp_path: Path) -> None:
    first, second = world(2).run(step_together, str(tmp_path))
    assert first == second
    assert len(first) == 6
