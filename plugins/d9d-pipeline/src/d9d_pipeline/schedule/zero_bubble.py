"""ZB-H1: 1F1B with weight gradients in its bubbles."""

from __future__ import annotations

from collections.abc import Sequence

from d9d_core.schedule import Action, Forward, InputBackward, Program, WeightBackward

from d9d_pipeline.schedule.insert_transfers import insert_transfers
from d9d_pipeline.schedule.placement import loop
from d9d_pipeline.schedule.units import check, depth_first, rounds


def zb1p(ranks: int, microbatches: int, stages_per_rank: int = 1) -> Sequence[Program]:
    """Zero-bubble schedule ZB-H1 (Qi et al. 2024, arXiv:2401.10241, section 2.1), optionally with several stages.

    Rank r delays weight gradients by r backwards, so that every rank holds as many activations as the first rank.
    """
    check("zb1p", ranks, microbatches)
    placement = loop(ranks, stages_per_rank)
    groups = rounds(microbatches, ranks)
    orders = []
    for rank, stages in enumerate(placement):
        forwards, backwards = depth_first(stages, groups), depth_first(stages[::-1], groups)
        ahead = min(len(forwards), (stages_per_rank - 1) * max(map(len, groups)) + ranks - 1 - rank)
        order: list[Action] = [Forward(*unit) for unit in forwards[:ahead]]
        for step, unit in enumerate(backwards):
            if ahead + step < len(forwards):
                order.append(Forward(*forwards[ahead + step]))
            order.append(InputBackward(*unit))
            if step >= rank:
                order.append(WeightBackward(*backwards[step - rank]))
        order += (WeightBackward(*unit) for unit in backwards[max(0, len(backwards) - rank) :])
        orders.append(order)
    return insert_transfers(orders, placement)
