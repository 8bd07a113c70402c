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
    """1F1B: after a warm-up of forwards, one forward and one backward in turn."""

    name: Literal["1f1b"] = "1f1b"
    """Selects the plugin."""


class InterleavedConfig(ScheduleConfig):
    """Interleaved 1F1B: 1F1B with several stages on each rank."""

    name: Literal["interleaved_1f1b"] = "interleaved_1f1b"
    """Selects the plugin."""
    stages_per_rank: int = Field(default=2, ge=1, le=MAX_STAGES)
    """Stages on each rank; more stages mean a smaller bubble and more communication."""


class Zb1pConfig(ScheduleConfig):
    """ZB-H1: 1F1B with backwards split in input and weight gradients; weight gradients fill idle times."""

    name: Literal["zb1p"] = "zb1p"
    """Selects the plugin."""
    stages_per_rank: int = Field(default=1, ge=1, le=MAX_STAGES)
    """Stages on each rank; more stages mean a smaller bubble and more communication."""


class ZeroBubbleVConfig(ScheduleConfig):
    """ZB-V: two stages on each rank, placed from the first rank to the last and back, with split backwards."""

    name: Literal["zero_bubble_v"] = "zero_bubble_v"
    """Selects the plugin."""


class DualPipeVConfig(ScheduleConfig):
    """DualPipeV: stages placed from the first rank to the last and back; forwards overlap with backwards."""

    name: Literal["dual_pipe_v"] = "dual_pipe_v"
    """Selects the plugin."""
