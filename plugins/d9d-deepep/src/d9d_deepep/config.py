"""Config of the strategy ``deepep``; apart from it, because reading a job file imports no torch."""

from __future__ import annotations

from typing import Literal

from d9d_core.config import PluginConfig


class DeepEPConfig(PluginConfig):
    """Dispatch of tokens by the library DeepEP; needs ``expert_parallel`` beside it."""

    name: Literal["deepep"] = "deepep"
    """Selects the plugin."""
