"""Pass over orders of computation that moves weight gradients into the bubbles (idle times)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from d9d_core.schedule import Action, InputBackward, WeightBackward

from d9d_pipeline.schedule.ideal_timing import ideal_starts


def fill_bubbles(orders: Sequence[Sequence[Action]]) -> list[list[Action]]:
    """Fill bubbles: move weight gradients to where a rank would wait; all other actions keep their order.

    Activations are held until their weight gradients are computed, so memory must suffice for all microbatches.

    Args:
        orders: computation of each rank, with every backward split in two halves.
    """
    others = [tuple(action for action in order if not isinstance(action, WeightBackward)) for order in orders]
    filled = []
    for order, begins in zip(others, ideal_starts(others), strict=True):
        actions: list[Action] = []
        waiting: deque[WeightBackward] = deque()
        clock = 0.0
        for action, begin in zip(order, begins, strict=True):
            while waiting and clock + 1 <= begin:
                actions.append(waiting.popleft())
                clock += 1
            actions.append(action)
            clock = max(clock, begin) + 1
            if isinstance(action, InputBackward):
                waiting.append(WeightBackward(action.stage, action.microbatch))
        filled.append([*actions, *waiting])
    return filled
