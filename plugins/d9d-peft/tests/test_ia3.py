"""Learned scales of activations, and that they need nothing but contracts."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from d9d_peft.ia3.config import Ia3Config
from d9d_peft.ia3.method import Ia3
from d9d_weights.graph.graph import map_tensors
from torch import Tensor, nn


def test_it_is_written_as_a_method_of_another_package_would_be() -> None:
    spec = find_spec("d9d_peft.ia3")
    assert spec is not None
    assert spec.origin is not None
    own = Path(spec.origin).parent
    modules = [
        node.module
        for file in own.glob("*.py")
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module
    ]
    of_others = {module for module in modules if module.startswith("d9d_") and not module.startswith("d9d_peft.ia3")}
    assert {module.partition(".")[0] for module in of_others} == {"d9d_core", "d9d_weights"}


def adapted() -> tuple[nn.Module, Ia3]:
    torch.manual_seed(0)
    stage = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)).to(torch.float32)
    method = Ia3(Ia3Config(targets=("0",), feedforward=("1",)))
    assert method.inject(stage) == {"0.ia3_l.weight", "1.ia3_l.weight"}
    with torch.no_grad():
        for number in "01":
            stage.get_parameter(f"{number}.ia3_l.weight").copy_(torch.arange(6) - 2.0)
    return stage, method


def expected(stage: nn.Module, x: Tensor) -> Tensor:
    scale = torch.arange(6) - 2.0
    first, second = ((stage.get_parameter(f"{n}.weight"), stage.get_parameter(f"{n}.bias")) for n in "01")
    return ((x @ first[0].T + first[1]) * scale * scale) @ second[0].T + second[1]


@pytest.mark.thorough
def test_outputs_of_targets_and_inputs_of_feed_forward_layers_are_scaled() -> None:
    stage, _ = adapted()
    x = torch.randn(5, 4)
    torch.testing.assert_close(stage(x), expected(stage, x))


def test_scales_change_no_number_format() -> None:
    stage, _ = adapted()
    with torch.autocast("cpu", torch.bfloat16):
        assert stage[0](torch.randn(5, 4)).dtype == torch.bfloat16
    with torch.no_grad():
        stage.get_submodule("0").bfloat16().get_submodule("ia3_l").float()
    assert stage[0](torch.randn(5, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_merging_leaves_plain_layers_behind() -> None:
    stage, method = adapted()
    x = torch.randn(5, 4)
    before = stage(x)
    method.merge(stage)
    torch.testing.assert_close(stage(x), before)
    assert [type(layer) for layer in stage] == [nn.Linear, nn.Linear]


def test_merged_tensors_of_a_checkpoint_keep_their_dtype() -> None:
    _, method = adapted()
    saved = {
        "0.weight": torch.full((6, 4), 0.5), "0.bias": torch.full((6,), 3.0), "1.weight": torch.full((3, 6), 0.5),
        "1.bias": torch.ones(3),
    }  # fmt: skip
    saved = {name: tensor.bfloat16() for name, tensor in saved.items()}
    scales = {f"{number}.ia3_l.weight": torch.arange(6) - 2.0 for number in "01"}
    merged = map_tensors(method.merger([*saved, *scales]), saved | scales)
    assert {name: tensor.dtype for name, tensor in merged.items()} == dict.fromkeys(saved, torch.bfloat16)
    halves = [-1.0, -0.5, 0.0, 0.5, 1.0, 1.5]
    assert merged["0.weight"].T.tolist() == [halves] * 4
    assert merged["0.bias"].tolist() == [6 * half for half in halves]
    assert merged["1.weight"].tolist() == [halves] * 3
    assert merged["1.bias"].tolist() == [1.0] * 3
