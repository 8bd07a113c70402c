"""DualPipeV: forwards and backwards in pairs, so that each hides the communication of the other."""

from __future__ import annotations

from collections.abc import Sequence

from d9d_core.schedule import Action, Program

from d9d_pipeline.schedule.insert_transfers import insert_transfers
from d9d_pipeline.schedule.order_builder import OrderBuilder
from d9d_pipeline.schedule.placement import vee
from d9d_pipeline.schedule.units import check


def dual_pipe_v(ranks: int, microbatches: int) -> Sequence[Program]:
    """DualPipeV: half of the schedule DualPipe (DeepSeek-V3, arXiv:2412.19437, section 3.2.1), stages placed in a V.

    DualPipeV is described at github.com/deepseek-ai/DualPipe. It needs at least ``2 * ranks`` microbatches.
    """
    check("dual_pipe_v", ranks, microbatches, least=2 * ranks)
    return insert_transfers([_order(rank, ranks, microbatches) for rank in range(ranks)], vee(ranks))


def _order(rank: int, ranks: int, microbatches: int) -> list[Action]:
    down, up = vee(ranks)[rank]
    behind = ranks - 1 - rank
    steps = OrderBuilder(microbatches)
    for _ in range(2 * behind):
        steps.forward(down)
    for _ in range(rank + 1):
        steps.forward(down)
        steps.forward(up)
    for _ in range(behind):
        steps.input_backward(up)
        steps.weight_backward()
        steps.forward(up)
    for index in range(microbatches - 2 * ranks + rank + 1):
        if index == 0 and behind == 0:
            # On the last rank, a pair of these two would deadlock through its neighbours, so they run one by one.
            steps.forward(down)
            steps.backward(up)
        else:
            steps.overlap(down, up)
        steps.overlap(up, down)
    for _ in range(behind):
        steps.backward(up)
        steps.overlap(up, down)
    _last_backwards(steps, rank, behind)
    return steps.actions


def _last_backwards(steps: OrderBuilder, rank: int, behind: int) -> None:
    """Append the backwards after the last forward; all but the first ``rank + 1`` defer their weight gradients."""
    down, up = vee(rank + behind + 1)[rank]
    turns = [stage for _ in range(rank + 1) for stage in (up, down)] + [down] * behind
    for index, stage in enumerate(turns):
        if index > 2 * rank + 1:
            steps.weight_backward()
        if index > rank:
            steps.input_backward(stage)
        else:
            steps.backward(stage)
    while steps.open:
        steps.weight_backward()
