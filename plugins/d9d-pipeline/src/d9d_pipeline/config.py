"""Job file section ``pipeline``: one config for each schedule."""

from __future__ import annotations

from typing import Literal

from d9d_core.config import ScheduleConfig
from pydantic import Field

#: Largest number of stages of a rank; no model has more layers.
MAX_STAGES = 1024


class GPipeConfig(ScheduleConfig):
    """GPipe: all forwards, then all backwards."""

    name: Literal["gpipe"] = "gpipe"
    """Selects the plugin."""


class LoopedBfsConfig(ScheduleConfig):
    """Breadth-first pipeline: all forwards of one stage after another, then all backwards."""

    name: Literal["looped_bfs"] = "looped_bfs"
    """Selects the plugin."""
    stages_per_rank: int = Field(default=2, ge=1, le=MAX_STAGES)
    """Stages on each rank; more stages mean a smaller bubble and more communication."""


class OneForwardOneBackwardConfig(ScheduleConfig):
    """1F1B: a forward and a backward in turn."""

    name: Literal["1f1b"] = "1f1b"
    """Selects the plugin."""


class InterleavedConfig(ScheduleConfig):
    """Interleaved 1F1B: a forward and a backward in turn, with several stages on each rank."""

    name: Literal["interleaved_1f1b"] = "interleaved_1f1b"
    """Selects the plugin."""
    stages_per_rank: int = Field(default=2, ge=1, le=MAX_STAGES)
    """Stages on each rank; more stages mean a smaller bubble and more communication."""


class Zb1pConfig(ScheduleConfig):
    """ZB-H1: a forward, input gradients and weight gradients in turn."""

    name: Literal["zb1p"] = "zb1p"
    """Selects the plugin."""
    stages_per_rank: int = Field(default=1, ge=1, le=MAX_STAGES)
    """Stages on each rank; more stages mean a smaller bubble and more communication."""


class ZeroBubbleVConfig(ScheduleConfig):
    """ZB-V: two stages on each rank in a V, with weight gradients computed apart from input gradients."""

    name: Literal["zero_bubble_v"] = "zero_bubble_v"
    """Selects the plugin."""


class DualPipeVConfig(ScheduleConfig):
    """DualPipeV: two stages on each rank in a V, with forwards overlapped with backwards."""

    name: Literal["dual_pipe_v"] = "dual_pipe_v"
    """Selects the plugin."""
