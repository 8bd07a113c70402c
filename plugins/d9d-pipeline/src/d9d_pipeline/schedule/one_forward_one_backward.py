"""1F1B schedules: a few forwards, then a forward and a backward in turn, with the least memory."""

from __future__ import annotations

from collections.abc import Sequence

from d9d_core.schedule import Action, Backward, Forward, Program

from d9d_pipeline.schedule.insert_transfers import insert_transfers
from d9d_pipeline.schedule.placement import loop
from d9d_pipeline.schedule.units import check, depth_first, rounds


def one_forward_one_backward(ranks: int, microbatches: int) -> Sequence[Program]:
    """1F1B (PipeDream-Flush; Narayanan et al. 2021, arXiv:2006.09503, section 3.2): one stage on each rank.

    Rank r holds at most ``ranks - r`` microbatches.
    """
    check("1f1b", ranks, microbatches)
    return insert_transfers(
        [_order((rank,), ranks, ranks - 1 - rank, microbatches) for rank in range(ranks)], loop(ranks, 1)
    )


def interleaved_one_forward_one_backward(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Sequence[Program]:
    """Interleaved 1F1B (Megatron-LM; Narayanan et al. 2021, arXiv:2104.04473, section 2.2).

    The number of microbatches need not be a multiple of the ranks: rounds are then larger than the number of ranks.
    """
    check("interleaved_1f1b", ranks, microbatches)
    placement = loop(ranks, stages_per_rank)
    largest = max(map(len, rounds(microbatches, ranks)))
    orders = []
    for rank, stages in enumerate(placement):
        # As in Megatron-LM: for each rank after this one, the first backward arrives two forwards later.
        ahead = (stages_per_rank - 1) * largest + 2 * (ranks - 1 - rank)
        orders.append(_order(stages, ranks, ahead, microbatches))
    return insert_transfers(orders, placement)


def _order(stages: Sequence[int], ranks: int, ahead: int, microbatches: int) -> list[Action]:
    groups = rounds(microbatches, ranks)
    forwards = depth_first(stages, groups)
    backwards = depth_first(stages[::-1], groups)
    ahead = min(ahead, len(forwards))
    order: list[Action] = [Forward(*unit) for unit in forwards[:ahead]]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        order += (Forward(*forward), Backward(*backward))
    return [*order, *(Backward(*unit) for unit in backwards[len(forwards) - ahead :])]
