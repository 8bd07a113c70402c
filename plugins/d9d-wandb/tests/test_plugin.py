"""The declaration keeps what holds for every plugin."""

from __future__ import annotations

from typing import ClassVar

from d9d_testing.suites.plugin import PluginSuite


class TestPlugin(PluginSuite):
    plugin = "d9d_wandb.plugin"
    examples: ClassVar = {"wandb": {"project": "mine"}}
