"""The declaration keeps what holds for every plugin."""

from __future__ import annotations

from d9d_testing.suites.fresh import import_fresh
from d9d_testing.suites.plugin import PluginSuite


class TestPlugin(PluginSuite):
    plugin = "d9d_qwen3_next.plugin"
    builds_on = ("d9d_moe.plugin", "d9d_nn.plugin")


def test_configs_and_formats_are_read_without_torch() -> None:
    modules = ("d9d_qwen3_next.config", "d9d_qwen3_next.costs", "d9d_qwen3_next.hugging_face")
    facts = import_fresh(*modules)
    assert all("torch" not in facts[module].modules for module in modules)
