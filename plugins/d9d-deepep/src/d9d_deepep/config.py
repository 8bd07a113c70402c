"""What a job file says about DeepEP."""

from __future__ import annotations

from typing import Literal

from d9d_core.extend import PluginConfig


class DeepEPConfig(PluginConfig):
    """Tokens travel by the library DeepEP; needs ``expert_parallel`` beside it."""

    name: Literal["deepep"] = "deepep"
    """Selects the plugin."""
