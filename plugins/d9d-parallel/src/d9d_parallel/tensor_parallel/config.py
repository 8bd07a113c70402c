"""Config of the strategy ``tensor_parallel``."""

from __future__ import annotations

from typing import Literal

from d9d_core.config import PartConfig


class TensorParallelConfig(PartConfig):
    """Tensor parallelism of attention, feed-forward, embedding and head; other layers split the positions."""

    name: Literal["tensor_parallel"] = "tensor_parallel"
    """Selects the plugin."""
    asynchronous: bool = False
    """Overlap the sequence-parallel all-gather and reduce-scatter with the adjacent matrix products, in chunks."""
