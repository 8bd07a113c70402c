"""What a job file says about expert parallelism."""

from __future__ import annotations

from typing import Literal

from d9d_core.extend import PluginConfig


class ExpertParallelConfig(PluginConfig):
    """Each rank of ``ep`` keeps an equal share of every layer's experts, and tokens travel to them."""

    name: Literal["expert_parallel"] = "expert_parallel"
    """Selects the plugin."""
