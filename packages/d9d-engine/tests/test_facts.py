"""Tests of the facts of a start."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from d9d_engine.compose.facts import start_facts
from d9d_engine.compose.kernels import KernelChoice
from torch import nn


def test_plugins_are_listed_with_their_components_and_kernels() -> None:
    def entry(kind: str, name: str, distribution: str) -> Any:
        origin = SimpleNamespace(distribution=distribution)
        return SimpleNamespace(
            entry=SimpleNamespace(kind=SimpleNamespace(name=kind), origin=origin), spec=SimpleNamespace(name=name)
        )

    chosen = [entry("model", "a", "d9d-b"), entry("task", "c", "/x/mine.py"), entry("model", "a", "d9d-b")]
    kernels = [
        KernelChoice("attention", (), "fast", "d9d-b 1.2.0", False, {}),
        KernelChoice("norm", (), "own", "/x/mine.py", True, {}),
        KernelChoice("norm", (), "reference", "", False, {}),
    ]
    model = nn.Linear(1, 1)
    assembly = SimpleNamespace(full_model=model, trained=dict)
    selection, stream = SimpleNamespace(all=lambda: chosen), SimpleNamespace(facts={})
    parts = cast("Any", (selection, assembly, kernels, torch.device("cpu"), stream))
    assert start_facts(*parts)["plugins"] == {
        "d9d-b": ["model a", "kernel fast of attention"],
        "mine.py": ["task c", "kernel own of norm"],
    }


def test_facts_of_the_data_are_kept_as_json_values(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    assembly = SimpleNamespace(full_model=model, trained=lambda: {"bias": model.bias})
    data = {"samples": 7, "entropy": math.nan, "parts": [{"path": tmp_path}]}
    selection, stream = SimpleNamespace(all=list), SimpleNamespace(facts=data)
    found = start_facts(cast("Any", selection), cast("Any", assembly), [], torch.device("cpu"), cast("Any", stream))
    assert found == {
        "device": "cpu",
        "parameters": 9,
        "trained_parameters": 3,
        "data": {"samples": 7, "entropy": "NaN", "parts": [{"path": str(tmp_path)}]},
        "plugins": {},
    }
