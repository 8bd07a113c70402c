"""Config of the strategy ``expert_parallel``; apart from it, because reading a job file imports no torch."""

from __future__ import annotations

from typing import Literal

from d9d_core.config import PluginConfig


class ExpertParallelConfig(PluginConfig):
    """Expert parallelism: each rank of ``ep`` keeps a share of every layer's experts, and tokens travel to them."""

    name: Literal["expert_parallel"] = "expert_parallel"
    """Selects the plugin."""
    combine: Literal["summed", "separate"] = "summed"
    """Outputs of a token's experts on one rank return as their sum, or each by itself, to be added up as one process
    does: then outputs do not depend on the layout to the last bit, for more traffic."""
