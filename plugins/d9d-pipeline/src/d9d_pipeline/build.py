"""Builders that make a schedule from its config: a function of the numbers of pipeline ranks and of microbatches."""

from __future__ import annotations

from functools import partial

from d9d_core.schedule import Schedule

from d9d_pipeline.config import (
    DualPipeVConfig,
    GPipeConfig,
    InterleavedConfig,
    LoopedBfsConfig,
    OneForwardOneBackwardConfig,
    Zb1pConfig,
    ZeroBubbleVConfig,
)
from d9d_pipeline.schedule.breadth_first import gpipe, looped_bfs
from d9d_pipeline.schedule.dual_pipe_v import dual_pipe_v
from d9d_pipeline.schedule.one_forward_one_backward import (
    interleaved_one_forward_one_backward,
    one_forward_one_backward,
)
from d9d_pipeline.schedule.zero_bubble import zb1p
from d9d_pipeline.schedule.zero_bubble_v import zero_bubble_v


def build_gpipe(config: GPipeConfig) -> Schedule:  # noqa: ARG001 - the signature of ScheduleSpec, here and below
    """Make the schedule ``gpipe`` of a job file."""
    return gpipe


def build_looped_bfs(config: LoopedBfsConfig) -> Schedule:
    """Make the schedule ``looped_bfs`` of a job file."""
    return partial(looped_bfs, stages_per_rank=config.stages_per_rank)


def build_1f1b(config: OneForwardOneBackwardConfig) -> Schedule:  # noqa: ARG001
    """Make the schedule ``1f1b`` of a job file."""
    return one_forward_one_backward


def build_interleaved_1f1b(config: InterleavedConfig) -> Schedule:
    """Make the schedule ``interleaved_1f1b`` of a job file."""
    return partial(interleaved_one_forward_one_backward, stages_per_rank=config.stages_per_rank)


def build_zb1p(config: Zb1pConfig) -> Schedule:
    """Make the schedule ``zb1p`` of a job file."""
    return partial(zb1p, stages_per_rank=config.stages_per_rank)


def build_zero_bubble_v(config: ZeroBubbleVConfig) -> Schedule:  # noqa: ARG001
    """Make the schedule ``zero_bubble_v`` of a job file."""
    return zero_bubble_v


def build_dual_pipe_v(config: DualPipeVConfig) -> Schedule:  # noqa: ARG001
    """Make the schedule ``dual_pipe_v`` of a job file."""
    return dual_pipe_v
