"""The declaration keeps what holds for every plugin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from d9d_testing.suites.fresh import import_fresh
from d9d_testing.suites.plugin import PluginSuite


class TestPlugin(PluginSuite):
    plugin = "d9d_nn.plugin"
    builds_on = ("d9d_testing.toy.plugin",)
    examples: ClassVar[Mapping[str, Any]] = {"distillation": {"teacher": {"name": "toy_model"}}}


def test_configs_load_without_torch() -> None:
    facts = import_fresh("d9d_nn.causal_lm.config", "d9d_nn.initialization")
    assert "torch" not in facts["d9d_nn.causal_lm.config"].modules | facts["d9d_nn.initialization"].modules
