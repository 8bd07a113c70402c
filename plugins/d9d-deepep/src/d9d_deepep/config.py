"""Config of the strategy ``deepep``; a separate module, because reading a job file must not import torch."""

from __future__ import annotations

from typing import Literal

from d9d_core.config import PluginConfig


class DeepEPConfig(PluginConfig):
    """Dispatch of tokens by the library DeepEP; requires the strategy ``expert_parallel``."""

    name: Literal["deepep"] = "deepep"
    """Selects the plugin."""
