"""A pipeline step keeps nothing alive: no output of a stage, no boundary, no graph."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
from d9d_testing.layouts import job_of, topology_here
from d9d_testing.world import World
from torch import Tensor, nn

PLUGINS = ["d9d_testing.toy.plugin", "d9d_pipeline.plugin"]
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zb1p", "zero_bubble_v", "dual_pipe_v")


def job(directory: Path, schedule: str) -> dict[str, Any]:
    return {
        "run": {"name": schedule, "dir": str(directory)},
        "steps": 4,
        "device": "cpu",
        "batch": {"size": 8, "microbatch": 1},
        "mesh": {"pp": 2},
        "model": {"name": "toy_model", "blocks": 5, "dropout": 0.0},
        "pipeline": schedule,
        "data": "toy_data",
        "task": {"name": "toy_task", "decay": 0.01},
        "optimizer": "toy_optimizer",
        "metrics": ["toy_metric"],
    }


def alive_after_steps(jobs: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """Outputs of blocks, and their graphs, that were seen and that are still alive; runs on every rank of a world."""
    found = []
    for values in jobs:
        trained = job_of(values, PLUGINS)
        trainer = trained.build(lambda _note: None, topology_here(trained))
        seen: list[weakref.ref[Any]] = []

        def watch(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor, seen: Any = seen) -> None:
            graph = output.grad_fn
            assert graph is not None
            seen += [weakref.ref(tensor) for tensor in (*inputs, output)]
            # An object of the graph that lives as long as the graph does.
            graph.metadata["witness"] = witness = Witness()
            seen.append(weakref.ref(witness))

        for module in trainer.stage.modules():
            if hasattr(module, "dropout"):
                module.register_forward_hook(watch)
        gc.collect()
        gc.disable()  # what only a collection would free counts as alive
        for step in range(2):
            trainer.step(step, trainer.prefetcher.next())
        found.append((len(seen), sum(reference() is not None for reference in seen)))
        gc.enable()
        trainer.prefetcher.load_state(trainer.prefetcher.state())
    return found


class Witness:
    """Something that can be watched."""


@pytest.mark.thorough
def test_nothing_is_alive_after_a_step(world: type[World], tmp_path: Path) -> None:
    for found in world(2).run(alive_after_steps, [job(tmp_path, schedule) for schedule in SCHEDULES]):
        assert all(seen for seen, _ in found)
        assert dict(zip(SCHEDULES, (alive for _, alive in found), strict=True)) == dict.fromkeys(SCHEDULES, 0)
