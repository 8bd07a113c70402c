"""Config of the strategy ``expert_parallel``; apart from it, because reading a job file imports no torch."""

from __future__ import annotations

from typing import Literal

from d9d_core.extend import PluginConfig


class ExpertParallelConfig(PluginConfig):
    """Expert parallelism: each rank of ``ep`` keeps a share of every layer's experts, and tokens travel to them."""

    name: Literal["expert_parallel"] = "expert_parallel"
    """Selects the plugin."""
