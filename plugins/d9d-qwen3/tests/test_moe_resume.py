"""What of a model with experts a resumed run may change."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
from d9d_core.errors import CheckpointError
from d9d_core.registry.registry import Registry
from d9d_engine.job import Job
from d9d_qwen3.moe_config import tiny

BIAS = {"name": "bias_update", "rate": 0.01}


def train(directory: Path, steps: int, **model: Any) -> list[str]:
    """Train up to so many steps; output of the run."""
    names = ("d9d_moe.plugin", "d9d_nn.plugin", "d9d_testing.toy.plugin", "d9d_qwen3.plugin")
    registry = Registry.of(*map(importlib.import_module, names))
    values = {
        "run": {"dir": str(directory)},
        "device": "cpu",
        "model": {**tiny().model_dump(), **model},
        "task": "causal_lm",
        "data": "toy_tokens",
        "metrics": ["router"],
        "optimizer": "toy_optimizer",
        "batch": {"size": 2},
        "steps": steps,
        "trackers": [],
        "export": False,
    }
    notes: list[str] = []
    assert Job.from_values(values, registry=registry).build(notes.append).train().step == steps
    return notes


@pytest.mark.thorough
def test_what_touches_no_tensor_may_change(tmp_path: Path) -> None:
    train(tmp_path, 1, balancing=["z_loss"])
    notes = train(tmp_path, 2, balancing=[{"name": "auxiliary_loss", "coefficient": 0.1}], capacity=2.0)
    changed = [note.removeprefix("changed since step-00000001: ") for note in notes if note.startswith("changed")]
    assert [line.partition(":")[0] for line in changed] == ["model.balancing", "model.capacity", "steps"]
    notes = train(tmp_path, 3, expert_files="fused")
    assert "changed since step-00000002: model.expert_files: 'per_expert' -> 'fused'" in notes
    with pytest.raises(CheckpointError, match="is of another model: model.renormalise: True there, False here"):
        train(tmp_path, 4, renormalise=False)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        (
            ["z_loss", BIAS],
            ["z_loss"],
            "the checkpoint has a selection_bias in each router, which this model lacks; keep",
        ),
        (["z_loss"], ["z_loss", BIAS], "the checkpoint lacks the selection_bias that bias_update updates; remove"),
    ],
)
def test_a_selection_bias_neither_comes_nor_goes(tmp_path: Path, before: Any, after: Any, text: str) -> None:
    train(tmp_path, 1, balancing=before)
    with pytest.raises(CheckpointError, match=f"step-00000001 is of another model: model.balancing: {text}"):
        train(tmp_path, 2, balancing=after)


def test_how_a_selection_bias_moves_may_change(tmp_path: Path) -> None:
    train(tmp_path, 1, balancing=[BIAS])
    assert any("model.balancing" in note for note in train(tmp_path, 2, balancing=["bias_update"]))
