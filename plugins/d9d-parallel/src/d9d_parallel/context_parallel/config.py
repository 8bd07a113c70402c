"""Config of the strategy ``context_parallel``."""

from __future__ import annotations

from typing import Literal

from d9d_core.extend import PluginConfig


class ContextParallelConfig(PluginConfig):
    """Context parallelism: positions of samples are split over ranks, which meet in attention only."""

    name: Literal["context_parallel"] = "context_parallel"
    """Selects the plugin."""
    method: Literal["ulysses", "all_gather", "ring"] = "all_gather"
    """Exchange in attention: positions for heads, or keys and values, which are gathered or go round."""
