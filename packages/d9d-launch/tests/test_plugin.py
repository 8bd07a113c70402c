"""Declarations of d9d-launch load, and keep the contract of plugins."""

from __future__ import annotations

from d9d_testing.suites.plugin import PluginSuite


class TestPlugin(PluginSuite):
    plugin = "d9d_launch.plugin"
