"""Breadth-first schedules: all forwards, then all backwards; they hold the activations of all microbatches."""

from __future__ import annotations

from collections.abc import Sequence

from d9d_core.schedule import Action, Backward, Forward, Program

from d9d_pipeline.schedule.insert_transfers import insert_transfers
from d9d_pipeline.schedule.placement import loop
from d9d_pipeline.schedule.units import check


def gpipe(ranks: int, microbatches: int) -> Sequence[Program]:
    """GPipe (Huang et al. 2019, arXiv:1811.06965, section 2.3): one stage on each rank."""
    check("gpipe", ranks, microbatches)
    return _breadth_first(ranks, microbatches, 1)


def looped_bfs(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Sequence[Program]:
    """Breadth-first pipeline (Lamy-Poirier 2023, arXiv:2211.05953, section 4).

    All microbatches go through one stage of a rank, then through its next stage.
    """
    check("looped_bfs", ranks, microbatches)
    return _breadth_first(ranks, microbatches, stages_per_rank)


def _breadth_first(ranks: int, microbatches: int, stages_per_rank: int) -> Sequence[Program]:
    placement = loop(ranks, stages_per_rank)
    orders: list[list[Action]] = []
    for stages in placement:
        order: list[Action] = [Forward(stage, index) for stage in stages for index in range(microbatches)]
        order += [Backward(stage, index) for stage in reversed(stages) for index in range(microbatches)]
        orders.append(order)
    return insert_transfers(orders, placement)
