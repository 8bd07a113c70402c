"""Traces of a pipeline: each rank writes its own, with the actions of its stage."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from d9d_testing.layouts import job_of, topology_here
from d9d_testing.toy.runs import toy_job
from d9d_testing.world import World


def train_here(values: dict[str, Any]) -> list[str]:
    """Train on a rank of a world; returns its notes."""
    notes: list[str] = []
    made = job_of(values, ["d9d_testing.toy.plugin", "d9d_pipeline.plugin"])
    made.build(notes.append, topology_here(made)).train()
    return notes


@pytest.mark.full
def test_each_rank_writes_a_trace_with_the_actions_of_its_stage(tmp_path: Path) -> None:
    made = toy_job(tmp_path, profiling={"every": 6, "warmup": 1, "active": 2}, mesh={"pp": 2})
    values = made.resolved() | {"pipeline": {"name": "1f1b"}}
    notes = World(2, timeout=120.0).run(train_here, values)
    assert [sum(note.startswith("profile of") for note in of_rank) for of_rank in notes] == [2, 0]
    folder = made.run.directory / "profile" / "step-12"
    assert sorted(path.name for path in folder.iterdir()) == ["rank-0-pp0.json.gz", "rank-1-pp1.json.gz"]
    for rank in range(2):
        with gzip.open(folder / f"rank-{rank}-pp{rank}.json.gz", "rt", encoding="utf-8") as file:
            found = [event.get("name") for event in json.load(file)["traceEvents"]]
        assert found.count(f"d9d/Forward stage {rank} microbatch 1") == 2
        assert found.count(f"d9d/Backward stage {rank} microbatch 0") == 2
        assert f"d9d/Forward stage {1 - rank} microbatch 1" not in found
        sent = "SendActivation stage 0" if rank == 0 else "SendGradient stage 1"
        assert f"d9d/{sent} microbatch 0" in found
