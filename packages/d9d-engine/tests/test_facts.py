"""Tests of the facts of a start."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from d9d_engine.compose.facts import start_facts
from torch import nn


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
