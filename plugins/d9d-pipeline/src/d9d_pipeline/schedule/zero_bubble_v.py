"""ZB-V: two stages on each rank, placed like a V."""

from __future__ import annotations

from collections.abc import Sequence

from d9d_core.schedule import Action, Forward, Program

from d9d_pipeline.schedule.fill_bubbles import fill_bubbles
from d9d_pipeline.schedule.insert_transfers import insert_transfers
from d9d_pipeline.schedule.order_builder import OrderBuilder
from d9d_pipeline.schedule.placement import vee
from d9d_pipeline.schedule.units import check


def zero_bubble_v(ranks: int, microbatches: int) -> Sequence[Program]:
    """ZB-V (Qi et al. 2024, arXiv:2401.10241, section 6 and figure 6): zero bubbles in the memory of 1F1B.

    No rank waits between its first and last action if forward, input gradients and weight gradients take equal times
    and communication takes none. The pattern needs ``2 * ranks - 1`` microbatches; with fewer, the actions of the
    missing microbatches are left out. With at most ``ranks`` microbatches, whose activations all fit into the memory of
    1F1B, weight gradients are moved into the resulting gaps.
    """
    check("zero_bubble_v", ranks, microbatches)
    orders = [_order(rank, ranks, microbatches) for rank in range(ranks)]
    return insert_transfers(fill_bubbles(orders) if microbatches <= ranks else orders, vee(ranks))


def _order(rank: int, ranks: int, limit: int) -> list[Action]:
    down, up = vee(ranks)[rank]
    microbatches = max(limit, 2 * ranks - 1)
    steps = OrderBuilder(limit)
    # Actions of microbatches past the limit are not appended, so loops end where nothing more would be appended.
    for _ in range(min(limit, 2 * (ranks - rank) - 1)):
        steps.forward(down)
    for _ in range(rank):
        if steps.count(Forward, up) >= limit <= steps.count(Forward, down):
            break
        steps.forward(up)
        steps.forward(down)
    for _ in range(min(limit, ranks - rank)):
        steps.forward(up)
        steps.both_halves(up)
    while steps.count(Forward, up) < microbatches:
        if steps.count(Forward, down) < microbatches:
            steps.forward(down)
        steps.both_halves(down)
        steps.forward(up)
        steps.both_halves(up)
    # After the last forward: first input gradients, then pairs of both halves, then the remaining weight gradients.
    for _ in range(rank):
        steps.input_backward(down)
        steps.input_backward(up)
    for _ in range(ranks - rank):
        steps.input_backward(down)
        steps.weight_backward_of(down)
    while steps.open:
        steps.weight_backward()
    return steps.actions
