"""The declaration keeps what holds for every plugin."""

from __future__ import annotations

from d9d_testing.suites.plugin import PluginSuite


class TestPlugin(PluginSuite):
    plugin = "d9d_fla.plugin"
