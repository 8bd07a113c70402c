"""Config of the strategy ``expert_parallel``; in its own file, because reading a job file imports no torch."""

from __future__ import annotations

from typing import Literal

from d9d_core.config import PartConfig


class ExpertParallelConfig(PartConfig):
    """Expert parallelism: each rank of ``ep`` keeps an equal part of every layer's experts; tokens are sent to them."""

    name: Literal["expert_parallel"] = "expert_parallel"
    """Selects the plugin."""
    combine: Literal["summed", "separate"] = "summed"
    """``summed``: a rank sums the outputs of a token's experts before it returns them. ``separate``: every output
    returns separately and is summed in the order of one process, so results are bit-identical for any number of ranks,
    at the cost of more traffic."""
