"""The declaration keeps what holds for every plugin."""

from __future__ import annotations

from typing import ClassVar

from d9d_testing.suites.plugin import PluginSuite


class TestPlugin(PluginSuite):
    plugin = "d9d_optim.plugin"
    examples: ClassVar = {
        "sgd": {"lr": 0.1},
        "ema": {"of": "adamw"},
        "torch": {"target": "torch.optim.RAdam"},
        "piecewise": {"phases": [{"to": 1.0}]},
    }
