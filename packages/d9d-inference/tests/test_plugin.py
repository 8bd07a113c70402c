"""Declarations of d9d-inference load, and keep the contract of plugins."""

from __future__ import annotations

from d9d_testing.suites.plugin import PluginSuite


class TestPlugin(PluginSuite):
    plugin = "d9d_inference.plugin"
    examples = {"samples": {"every": 10, "prompts": ["once"]}}
