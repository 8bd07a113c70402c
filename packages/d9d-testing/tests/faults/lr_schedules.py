"""Learning-rate schedules with one fault each."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import torch
from d9d_testing.suites.lr_schedule import LrScheduleSuite

Schedule = Callable[[int], Any]


class Sound(LrScheduleSuite):
    target = "linear"

    def build(self, *arguments: Any, **fields: Any) -> Schedule:
        return self.make(*arguments)

    def make(self, total: int) -> Schedule:
        return lambda step: max(0.0, 1 - step / total)


def counting(_self: object, total: int) -> Schedule:
    calls: Iterator[int] = count()
    return lambda _step: 1 / (1 + next(calls))


def stateful(_self: object, total: int) -> Schedule:
    last = [1.0]

    def at(step: int) -> float:
        last[0] = min(last[0], 1 - step / (2 * total))
        return last[0]

    return at


def drawn_once(_self: object, total: int) -> Schedule:
    noise = torch.rand(()).item()
    return lambda _step: noise


def table(_self: object, total: int) -> Schedule:
    factors = [1 - step / total for step in range(total)]
    return lambda step: factors[step]


def linear_of_last_step(_self: object, total: int) -> Schedule:
    """Reaches zero in the last step, which a run of one step does not have."""
    return lambda step: max(0.0, 1 - step / (total - 1))


def polynomial(_self: object, total: int) -> Schedule:
    """The root of a negative number is complex."""
    return lambda step: (1 - step / total) ** 0.9


FAULTS = {
    "counts its calls": ({"make": counting}, "without state"),
    "remembers the lowest factor": ({"make": stateful}, "without state"),
    "negative near the end": ({"make": lambda _s, total: lambda step: 1 - 2 * step / total}, "would increase the loss"),
    "infinite in the first step": (
        {"make": lambda _s, _t: lambda step: 1 / step if step else math.inf},
        "it must be finite",
    ),
    "NaN in the last step": (
        {"make": lambda _s, total: lambda step: math.nan if step == total - 1 else 1.0},
        "it must be finite",
    ),
    "no factor past the end": ({"make": table}, "past the end, raises IndexError"),
    "NaN past the end": (
        {"make": lambda _s, total: lambda step: 1.0 if step < total else math.nan},
        "past the end, has factor nan",
    ),
    "draws random numbers": ({"make": lambda _s, _t: lambda _step: random.random()}, ""),
    "draws one random number": (
        {"make": drawn_once},
        "",
    ),
    "returns tensors": ({"make": lambda _s, total: lambda step: torch.tensor(1 - step / total)}, "return a float"),
    "complex past the end": ({"make": polynomial}, ""),
    "divides by zero in a run of one step": ({"make": linear_of_last_step}, ""),
    "zero in every step": ({"make": lambda _s, _t: lambda _step: 0.0}, "nothing is trained"),
}
