"""A decoder with layers of Mamba-2 computes in every layout what one process does."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from d9d_core.errors import D9dError
from d9d_testing.layouts import Harness, job_of
from d9d_verify.layouts import Layout

PLUGIN = str(Path(__file__).with_name("mamba2_decoder.py"))
#: Layouts of the table that split or recompute a recurrent layer in ways that differ.
NAMES = {
    "replicate 2", "fsdp 2", "tp 2", "tp 4", "tp 2, checkpointed, compiled", "fsdp 2, tp 2", "cp 2, all_gather",
    "cp 4, ulysses", "cp 2, ring, checkpointed, compiled", "fsdp 2, cp 2, ulysses", "cp 2, ring, tp 2",
}  # fmt: skip
OFTEN = {"tp 2", "cp 2, all_gather", "cp 4, ulysses", "fsdp 2, tp 2"}


def model(table: ModuleType, **fields: Any) -> dict[str, Any]:
    return table.DENSE | {"name": "mamba_decoder", "num_layers": 2, "attention_layers": [1], **fields}


def harness(table: ModuleType, corpus: Path, **fields: Any) -> Harness:
    return Harness(table.job(corpus, "float32", model=model(table, **fields)), (*table.PLUGINS, PLUGIN), table.STEPS)


@pytest.mark.thorough
@pytest.mark.parametrize("names", [OFTEN, pytest.param(NAMES - OFTEN, marks=pytest.mark.full)], ids=["often", "rest"])
def test_layers_of_mamba_2_compute_what_one_process_does(table: ModuleType, tmp_path: Path, names: set[str]) -> None:
    chosen = [table.sized(layout, 3) for layout in table.LAYOUTS if layout.name in names]
    reference = table.sized(Layout("reference", {}, ()), 1)
    verdicts = harness(table, tmp_path / "corpus").compare(chosen, reference=reference)
    assert len(verdicts) == len(names)
    assert [(v.layout, v.diverged) for v in verdicts if not v.passed] == []


@pytest.mark.full
def test_stages_of_mamba_2_compute_what_one_process_does(table: ModuleType, tmp_path: Path) -> None:
    mixed = Layout(
        "fsdp 2, cp 2, tp 2", {"dp_shard": 2, "cp": 2, "tp": 2}, ["tensor_parallel", table.context("ring"), "fsdp"]
    )
    piped = [table.Piped("1f1b", 2, 3, data) for data in (table.LAYOUTS[0], mixed)]
    runs = harness(table, tmp_path / "corpus", num_layers=4, attention_layers=[3], vocab_size=264)
    for case in piped:
        (verdict,) = runs.compare([case.layout], reference=case.reference)
        assert verdict.passed, verdict.diverged


def test_ranks_that_do_not_divide_the_groups_are_refused(table: ModuleType, tmp_path: Path) -> None:
    values = table.job(tmp_path / "corpus", "float32", model=model(table, mamba_groups=1))
    values |= {"mesh": {"tp": 2}, "parallel": ["tensor_parallel"]}
    with pytest.raises(D9dError, match=r"mesh.tp is 2.* groups"):
        job_of(values, (*table.PLUGINS, PLUGIN)).plan()


def test_a_model_of_mamba_2_alone_learns(table: ModuleType, tmp_path: Path) -> None:
    values = table.job(tmp_path / "corpus", "float32", model=model(table, attention_layers=[]))
    trainer = job_of(
        values | {"steps": 12, "optimizer": {"name": "adamw", "lr": 0.02}}, (*table.PLUGINS, PLUGIN)
    ).build()
    losses = [float(trainer.step(step, trainer.prefetcher.next()).loss) for step in range(12)]
    assert losses[-1] < 0.8 * losses[0]
    assert all(bool(parameter.isfinite().all()) for parameter in trainer.stage.parameters())
