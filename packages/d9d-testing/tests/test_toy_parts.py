"""Logs of runs without what varies, and the toy model of linear layers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from d9d_core.errors import BuildError
from d9d_core.model import Stage
from d9d_testing.logs import read_log, read_log_without_times
from d9d_testing.toy.config import ToyLinearsConfig, ToyModelConfig, ToyPeftConfig
from d9d_testing.toy.format import ToyFormat
from d9d_testing.toy.linears import build
from d9d_testing.toy.model import ToyModel
from d9d_testing.toy.modifiers import ToyPeft


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


def test_the_outputs_of_the_toy_model_are_its_features_times_the_scale() -> None:
    model = ToyModel(ToyModelConfig(features=3, blocks=2)).eval()
    model.reset_parameters()
    x = torch.randn(4, 3)
    expected = x
    for block in model.layers.values():
        torch.nn.init.normal_(block.weight, std=0.3)
        expected = expected + torch.tanh(expected @ block.weight)
    torch.testing.assert_close(model(x=x)["y"], expected)
    ToyPeft(ToyPeftConfig()).merge(model)
    torch.testing.assert_close(model(x=x)["y"], 2 * expected)


def test_blocks_of_a_stage_are_split_evenly_with_the_rest_first() -> None:
    def blocks(blocks: int, index: int, count: int, layers: tuple[int, ...] | None = None) -> list[str]:
        return list(ToyModel(ToyModelConfig(blocks=blocks), Stage(index, count, layers)).layers)

    assert [blocks(5, index, 3) for index in range(3)] == [["0", "1"], ["2", "3"], ["4"]]
    assert [blocks(4, index, 2, (1, 3)) for index in range(2)] == [["0"], ["1", "2", "3"]]
    for layers in ((0, 4), (1, 2), (1, 1, 2)):
        with pytest.raises(BuildError, match=f"^toy_model: 4 blocks cannot be split over 2 stages as \\{list(layers)}"):
            blocks(4, 0, 2, layers)
