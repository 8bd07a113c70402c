"""The declaration keeps what holds for every plugin."""

from __future__ import annotations

from typing import ClassVar

import pytest
from d9d_peft import stack
from d9d_testing.suites.plugin import PluginSuite
from torch import nn


class TestPlugin(PluginSuite):
    plugin = "d9d_peft.plugin"
    examples: ClassVar = {
        "full_tune": {"match": ["heads.*"]},
        "stack": {"methods": [{"name": "lora", "r": 4}, {"name": "stack", "methods": ["ia3", "lora"]}]},
    }


@pytest.mark.parametrize(
    ("parameter", "layer"),
    [
        ("layers.0.q_proj.lora_A.weight", "layers.0.q_proj"),
        ("layers.0.q_proj", "layers.0"),
        ("experts.terms.up_proj.lora_A", "experts.terms.up_proj"),
        ("scale", ""),
    ],
)
def test_an_added_parameter_belongs_to_the_innermost_layer_around_it(parameter: str, layer: str) -> None:
    modules = {name: nn.Identity() for name in ("", "layers.0", "layers.0.q_proj", "experts")}
    assert stack._layer(parameter, {**modules, "experts.terms": nn.ModuleDict()}) == layer
