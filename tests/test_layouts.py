"""Every layout computes what one process does, and a layout that does not is noticed."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from d9d_core.verify.layouts import Layout


def test_every_layout_computes_what_one_process_does(table: ModuleType, tmp_path: Path) -> None:
    rows = table.run(tmp_path / "corpus")
    assert len(rows) == 2 * 2 * 6
    assert [(dtype, count, v.layout, v.diverged) for dtype, count, v in rows if not v.passed] == []
    assert _shown(table, table.DENSE_MARKS) == _rows(rows), _STALE


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_experts_compute_what_one_process_does_wherever_they_are(table: ModuleType, tmp_path: Path, dtype: str) -> None:
    rows = table.run_experts(tmp_path / "corpus", dtypes=[dtype])
    assert len(rows) == 12
    assert [(count, v.layout, v.diverged) for _, count, v in rows if not v.passed] == []
    shown = [row for row in _shown(table, table.EXPERT_MARKS) if row[0] == f"| {dtype}"]
    assert shown == _rows(rows), _STALE


_STALE = "docs/layouts.md shows other rows; run tools/layout_table.py"


def _rows(rows: list[Any]) -> list[list[str]]:
    return [[f"| {dtype}", str(count), v.layout] for dtype, count, v in rows]


def _shown(table: ModuleType, marks: tuple[str, str]) -> list[list[str]]:
    text = table.PAGE.read_text("utf-8").split(marks[0])[1].split(marks[1])[0]
    lines = [line for line in text.splitlines() if line.startswith(("| float32", "| bfloat16"))]
    return [line.split(" | ")[:3] for line in lines]


#: Norms are outside of FSDP, so the synchroniser has something to do.
WITHOUT_NORMS = Layout("replicate 2, norms apart", {"dp_replicate": 2}, [{"name": "replicate", "ignore": ["*norm*"]}])
FAULTS = {
    "forgotten_reduction": ("replicate 2, norms apart", "replicated parameters outside of FSDP keep partial sums"),
    "double_reduction": ("replicate 2", "gradients are summed over ranks twice"),
    "average_instead_of_sum": ("fsdp 2", "FSDP2 divides by the number of ranks"),
    "forgotten_replicas": ("hsdp 2 x 2", "shards are summed, copies of shards are not"),
    "wrong_loss_weight": ("fsdp 2", "each rank divides by its own targets instead of all"),
    "shuffled_shard": ("fsdp 2", "one rank reads other samples"),
    "last_microbatch_only": ("fsdp 2", "earlier microbatches are dropped"),
    "other_initial_weights": ("replicate 2", "initial weights depend on the rank"),
    "norm_of_own_shard": ("fsdp 2", "the gradient norm covers one shard only"),
    "lost_owner": ("replicate 2, norms apart", "one parameter's gradient stays local"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_seeded_fault_is_caught(table: ModuleType, tmp_path: Path, fault: str) -> None:
    name, meaning = FAULTS[fault]
    (layout,) = [layout for layout in (*table.LAYOUTS, WITHOUT_NORMS) if layout.name == name]
    file = Path(__file__).with_name("faults.py")
    ((_, _, verdict),) = table.run(tmp_path / "corpus", [layout], ["float32"], [3], f"{file}:{fault}")
    assert not verdict.passed, meaning


def test_the_layout_of_the_faults_passes_without_one(table: ModuleType, tmp_path: Path) -> None:
    ((_, _, verdict),) = table.run(tmp_path / "corpus", [WITHOUT_NORMS], ["float32"], [3])
    assert verdict.passed, verdict
