from __future__ import annotations

from typing import ClassVar

from d9d_testing.suites.plugin import PluginSuite


class TestPlugin(PluginSuite):
    plugin = "d9d_metrics.plugin"
    examples: ClassVar = {
        **{name: {"values": "token_loss"} for name in ("sum", "mean", "max", "min")},
        "weighted_mean": {"values": "token_loss", "weights": "weights"},
        "confusion": {"problem": {"kind": "binary"}},
        "compose": {"metrics": {"loss": {"name": "mean", "values": "token_loss"}}},
    }
