"""Logs of runs without what varies, and the toy model of linear layers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from d9d_core.errors import BuildError
from d9d_core.model import Stage
from d9d_testing.logs import read_log, read_log_without_times
from d9d_testing.toy.config import ToyLinearsConfig, ToyModelConfig
from d9d_testing.toy.format import ToyFormat
from d9d_testing.toy.linears import build


def test_logs_are_compared_without_times_and_memory(tmp_path: Path) -> None:
    lines = [{"step": 1, "loss": 2.0, "tokens_per_second": 3.0, "mfu": 0.5, "memory/reserved_gib": 1.0}, {"step": 2}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_log(tmp_path) == lines
    assert read_log_without_times(tmp_path) == [{"step": 1, "loss": 2.0}, {"step": 2}]


def test_toy_linears_are_residual_blocks_in_one_stage() -> None:
    config = ToyLinearsConfig(features=3, blocks=2)
    model = build(config, Stage())
    x = torch.randn(4, 3)
    expected = x
    for block in model.layers.values():  # type: ignore[union-attr, operator]
        expected = expected + torch.tanh(block.linear(expected))
    assert torch.equal(model(x=x)["y"], expected)
    assert list(model.blocks()) == ["layers.0", "layers.1"]  # type: ignore[operator]
    with pytest.raises(BuildError, match="this model has one stage"):
        build(config, Stage(0, 2))


def test_the_toy_format_keeps_the_width() -> None:
    written = ToyFormat().config_json(ToyModelConfig(features=5), "float32")
    assert written == {"model_type": "toy", "features": 5, "dtype": "float32"}
    assert ToyFormat().config_from_json(written) == ToyModelConfig(features=5)
