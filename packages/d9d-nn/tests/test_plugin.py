"""The declaration keeps what holds for every plugin."""

from __future__ import annotations

from d9d_testing.suites.fresh import import_fresh
from d9d_testing.suites.plugin import PluginSuite


class TestPlugin(PluginSuite):
    plugin = "d9d_nn.plugin"


def test_configs_load_without_torch() -> None:
    facts = import_fresh("d9d_nn.causal_lm.config", "d9d_nn.initialization")
    assert "torch" not in facts["d9d_nn.causal_lm.config"].modules | facts["d9d_nn.initialization"].modules
