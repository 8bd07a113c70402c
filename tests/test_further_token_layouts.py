"""A model that predicts further tokens computes in every layout what one process computes."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from d9d_testing.layouts import Harness, assert_passed
from d9d_verify.layouts import Layout

FURTHER = {"mtp": {"depths": 2, "weight": 0.5}}


def failed(rows: list[Any]) -> list[Any]:
    return [(verdict.layout, verdict.diverged) for _, _, verdict in rows if not verdict.passed]


def test_experts_and_context_parallelism_compute_what_one_process_does(table: ModuleType, tmp_path: Path) -> None:
    both = Layout("cp 2, ring, ep 2", {"cp": 2, "ep": 2}, [table.context("ring"), "expert_parallel"])
    rows = table.run(tmp_path / "corpus", [both], ["float32"], [3], model=table.LATENT | FURTHER)
    assert failed(rows) == []


@pytest.mark.thorough
def test_each_axis_computes_what_one_process_does(table: ModuleType, tmp_path: Path) -> None:
    names = {"fsdp 2", "tp 2, asynchronous", "cp 2, all_gather", "fsdp 2, tp 2, ep 2"}
    layouts = [layout for layout in table.LATENT_LAYOUTS if layout.name in names]
    rows = table.run(tmp_path / "corpus", layouts, ["float32"], [3], model=table.LATENT | FURTHER)
    assert len(rows) == len(names)
    assert failed(rows) == []


@pytest.mark.thorough
def test_a_family_with_other_layers_computes_what_one_process_does(table: ModuleType, tmp_path: Path) -> None:
    names = {"fsdp 2, tp 2, ep 2", "cp 2, ring"}
    layouts = [layout for layout in table.EXPERT_LAYOUTS if layout.name in names]
    model = table.HYBRID_EXPERTS | {"mtp": {"depths": 1}}
    assert failed(table.run(tmp_path / "corpus", layouts, ["float32"], [3], model=model)) == []


@pytest.mark.full
def test_low_rank_terms_train_alike_in_every_layout(table: ModuleType, tmp_path: Path) -> None:
    model = table.LATENT | FURTHER | {"num_layers": 4, "added_tokens": 8}
    peft = {"name": "lora", "r": 4, "targets": ["all-linear", "*.experts.gate_proj"]}
    values = table.job(tmp_path / "corpus", "float32", model=model)
    values |= {"peft": peft, "batch": {"size": 8, "microbatch": 8}}
    layouts = [
        Layout("fsdp 2", {"dp_shard": 2}, ["fsdp"], ("batch.microbatch=2",)),
        Layout("tp 2", {"tp": 2}, ["tensor_parallel"], ("batch.microbatch=4",)),
        Layout("zb1p", {"pp": 2}, [], ("pipeline.name=zb1p", "batch.microbatch=2")),
    ]
    assert_passed(Harness(values, [*table.PLUGINS, "d9d_peft.plugin"], 3).compare(layouts))


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_every_layout_computes_what_one_process_does(table: ModuleType, tmp_path: Path, dtype: str) -> None:
    model = table.LATENT | FURTHER | {"q_lora_rank": None, "tie_embeddings": True}
    assert failed(table.run(tmp_path / "corpus", table.LATENT_LAYOUTS, [dtype], [3], model=model)) == []


@pytest.mark.thorough
def test_pipelines_compute_what_one_process_does(table: ModuleType, tmp_path: Path) -> None:
    model, alone = table.LATENT | FURTHER, table.LAYOUTS[0]
    cases = [table.Piped(schedule, 2, 5, alone, tied=schedule == "zb1p", model=model) for schedule in ("1f1b", "zb1p")]
    assert failed(table.run_pipelines(tmp_path / "corpus", cases)) == []


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zb1p", "dual_pipe_v"])
def test_pipelines_with_other_axes_compute_what_one_process_does(
    table: ModuleType, tmp_path: Path, schedule: str
) -> None:
    model = table.LATENT | FURTHER | {"num_layers": 4}
    layouts = [
        table.EXPERT_LAYOUTS[5],
        Layout("tp 2", {"tp": 2}, ["tensor_parallel"]),
        Layout("cp 2, ring", {"cp": 2}, [table.context("ring")]),
    ]
    cases = [table.Piped(schedule, 2, 4, data, tied=tied, model=model) for data in layouts for tied in (False, True)]
    assert failed(table.run_pipelines(tmp_path / "corpus", cases)) == []
