"""Pipeline schedule ``v_gpipe``: all forwards, then all backwards; two stages per rank in a V.

A schedule generates plain data and imports no torch. Sends and receives are inserted for tensors that cross ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

from d9d_core.schedule import Action, Backward, Forward, Program, Schedule
from d9d_pipeline.schedule.insert_transfers import insert_transfers

from acme_tuning.config import VGpipeConfig


def build(config: VGpipeConfig) -> Schedule:  # noqa: ARG001 - no settings
    """Schedule for a config."""
    return programs


def programs(ranks: int, microbatches: int) -> Sequence[Program]:
    """Programs of all ranks for one step.

    Args:
        ranks: number of pipeline ranks.
        microbatches: number of microbatches of one step.

    Raises:
        ValueError: a number is less than 1.
    """
    if ranks < 1 or microbatches < 1:
        raise ValueError(f"v_gpipe: give 1 or more ranks and microbatches, not {ranks} and {microbatches}")
    # Rank 0 has the first and the last stage, so that tokens and loss are on the same rank.
    placement = tuple((rank, 2 * ranks - 1 - rank) for rank in range(ranks))
    orders: list[list[Action]] = []
    for down, up in placement:
        forwards: list[Action] = [Forward(stage, index) for stage in (down, up) for index in range(microbatches)]
        backwards: list[Action] = [Backward(stage, index) for stage in (up, down) for index in range(microbatches)]
        orders.append([*forwards, *backwards])
    return insert_transfers(orders, placement)
