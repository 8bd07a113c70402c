"""Latent attention computes in every layout what one process computes."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def failed(rows: list[Any]) -> list[Any]:
    return [(verdict.layout, verdict.diverged) for _, _, verdict in rows if not verdict.passed]


@pytest.mark.thorough
def test_each_axis_computes_what_one_process_does(table: ModuleType, tmp_path: Path) -> None:
    names = {
        "fsdp 2", "tp 2", "tp 2, asynchronous", "cp 2, all_gather", "cp 2, ring", "fsdp 2, ep 2",
        "cp 2, ring, checkpointed, compiled",
    }  # fmt: skip
    layouts = [layout for layout in table.LATENT_LAYOUTS if layout.name in names]
    rows = table.run(tmp_path / "corpus", layouts, ["float32"], [3], model=table.LATENT)
    assert len(rows) == len(names)
    assert failed(rows) == []


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("rank", [24, None], ids=["latent queries", "plain queries"])
def test_every_layout_computes_what_one_process_does(
    table: ModuleType, tmp_path: Path, rank: int | None, dtype: str
) -> None:
    model = table.LATENT | {"q_lora_rank": rank}
    rows = table.run(tmp_path / "corpus", table.LATENT_LAYOUTS, [dtype], [3], model=model)
    assert len(rows) == 39
    assert failed(rows) == []


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["1f1b", "zb1p", "dual_pipe_v"])
def test_pipelines_compute_what_one_process_does(table: ModuleType, tmp_path: Path, schedule: str) -> None:
    model = table.LATENT | {"num_layers": 4}
    alone, spread = table.LAYOUTS[0], table.EXPERT_LAYOUTS[5]
    cases = [table.Piped(schedule, 2, 5, data, tied=data is alone, model=model) for data in (alone, spread)]
    assert failed(table.run_pipelines(tmp_path / "corpus", cases)) == []
