"""Ideal start times of computations: each starts as early as possible, and transfers take no time."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from d9d_core.schedule import Backward, Forward, Overlap, Program, WeightBackward, compute_parts

#: Assumed time of a computation, in forwards; halves of a backward, which are not listed, take 1 each.
_COSTS = {Forward: 1, Backward: 2}


def ideal_starts(orders: Sequence[Program]) -> list[list[float]]:
    """Ideal start time of each computation of each rank; infinite for computations in a deadlock.

    Args:
        orders: forwards and backwards of each rank, in order.
    """
    parts = [part for order in orders for action in order for part in compute_parts(action)]
    stages = 1 + max((part.stage for part in parts), default=-1)
    size = 1 + max((part.microbatch for part in parts), default=-1)  # type: ignore[attr-defined]
    total = stages * size
    ends: list[float] = [-1] * (2 * total)  # of forwards, then of backwards
    begins: list[list[float]] = [[] for _ in orders]
    clocks: list[float] = [0] * len(orders)
    waiting: dict[int, int] = {}
    ready = list(range(len(orders)))
    while ready:
        rank = ready.pop()
        order, begun, clock = orders[rank], begins[rank], clocks[rank]
        for action in order[len(begun) :]:
            begin, cost, gives = clock, 0, []
            for part in (action,) if type(action) is not Overlap else compute_parts(action):
                kind = type(part)
                cost += _COSTS.get(kind, 1)  # type: ignore[arg-type]
                if kind is WeightBackward:
                    continue
                stage, at = part.stage, part.stage * size + part.microbatch  # type: ignore[attr-defined]
                need = (at - size if stage else -1) if kind is Forward else total + at + size
                gives.append(at if kind is Forward else total + at)
                if 0 <= need < len(ends):
                    if ends[need] < 0:
                        waiting[need] = rank
                        break
                    begin = max(begin, ends[need])
            else:
                begun.append(begin)
                clock = begin + cost
                for given in gives:
                    ends[given] = clock
                    if given in waiting:
                        ready.append(waiting.pop(given))
                continue
            break
        clocks[rank] = clock
    return [begun + [inf] * (len(order) - len(begun)) for begun, order in zip(begins, orders, strict=True)]
