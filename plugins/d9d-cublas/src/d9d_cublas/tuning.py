"""Measurement of the algorithms for one product, and the choice between them.

A GPU at its power limit runs slower than a GPU after a pause. So the host does not synchronise between candidates, and
all candidates are measured in several rounds, each in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Protocol

import torch
from torch import Tensor

from d9d_cublas.binding import LibraryError

#: Fraction of the default's time that another algorithm must save.
GAIN = 0.02
#: Largest time of a candidate in the first pass, as a multiple of the default's time.
SCREEN = 1.1
ROUNDS = 3
#: Milliseconds for which the warm-up, each candidate in the first pass, and each candidate in a round run.
HEAT, FIRST, ROUND = 300.0, 5.0, 10.0
#: Largest norm of the difference between a candidate's product and torch's, relative to the norm of torch's.
DISTANCE = 1e-2

Run = Callable[[], None]


class Clock(Protocol):
    """Timer of calls that run without a pause between them."""

    def __call__(self, runs: Sequence[Run], repetitions: Sequence[int]) -> list[float]:
        """Time calls; return the mean milliseconds of each call over its repetitions."""


def event_clock(runs: Sequence[Run], repetitions: Sequence[int]) -> list[float]:
    """Time calls by CUDA events on the current stream; synchronises once, at the end."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(runs) + 1)]  # type: ignore[no-untyped-call]
    events[0].record()
    for run, count, event in zip(runs, repetitions, events[1:], strict=True):
        for _ in range(count):
            run()
        event.record()
    events[-1].synchronize()
    pairs = zip(events, events[1:], repetitions, strict=False)
    return [before.elapsed_time(after) / count for before, after, count in pairs]


class Tuner:
    """Tuner: measures cuBLAS's default and other algorithms for one product, and chooses the fastest.

    Args:
        clock: timer of calls.
    """

    def __init__(self, clock: Clock = event_clock) -> None:
        self._clock = clock

    def choose(self, default: Run, candidates: Sequence[Run]) -> tuple[int | None, tuple[float, float]]:
        """Measure the default and all candidates, and choose one of them.

        Args:
            default: call that is chosen unless a candidate is clearly faster.
            candidates: calls of other algorithms whose results are correct.

        Returns:
            Index of the chosen candidate, or ``None`` for the default; milliseconds of the default and of the choice.
        """
        # The first call includes loading the kernel; the second call tells how many calls fit into a millisecond.
        once = self._clock([default, default], [1, 1])[1]
        heated, plain, *others = self._clock(
            [default, default, *candidates], _counts([HEAT] + [FIRST] * (1 + len(candidates)), once)
        )
        left = [number for number, time in enumerate(others) if time <= SCREEN * plain]
        if not left:
            return None, (plain, plain)
        times = self._rounds([default, *(candidates[number] for number in left)], heated)
        best = decide(times)
        chosen = None if best == 0 else left[best - 1]
        return chosen, (median(times[0]), median(times[best]))

    def _rounds(self, runs: Sequence[Run], once: float) -> list[list[float]]:
        """Time all calls in several rounds; return the milliseconds of each call in each round."""
        numbers = list(range(len(runs)))
        half = len(runs) // 2
        orders = [numbers, numbers[::-1], numbers[half:] + numbers[:half]]
        order = [number for round_ in orders[:ROUNDS] for number in round_]
        # The first call is not counted: it follows the pause in which the host evaluated the first pass.
        counts = _counts([ROUND] * (1 + len(order)), once)
        found = self._clock([runs[0], *(runs[number] for number in order)], counts)[1:]
        times: list[list[float]] = [[] for _ in runs]
        for number, time in zip(order, found, strict=True):
            times[number].append(time)
        return times


def decide(times: Sequence[Sequence[float]]) -> int:
    """Index of the call to choose: the default, index 0, unless another call is clearly faster.

    Args:
        times: milliseconds of each call in each round.

    Returns:
        Index of the call with the smallest median, among the calls that are faster than the default in each round and
        whose median is lower than the default's by at least the fraction :data:`GAIN`; 0 if there is none.
    """
    default = times[0]
    enough = (1 - GAIN) * median(default)
    faster = [
        number
        for number, run in enumerate(times)
        if median(run) <= enough and all(mine < its for mine, its in zip(run, default, strict=True))
    ]
    return min(faster, key=lambda number: median(times[number]), default=0)


def is_right(run: Run, out: Tensor, expected: Tensor) -> bool:
    """Whether a call writes the expected result; synchronises with the device.

    Args:
        run: writes into ``out``.
        out: is overwritten.
        expected: expected result, of the shape of ``out``.
    """
    out.fill_(torch.nan)
    try:
        run()
    except LibraryError:
        return False
    norms = [torch.linalg.vector_norm(each, dtype=torch.float32) for each in (out.sub_(expected), expected)]
    distance, norm = torch.stack(norms).tolist()
    return bool(distance <= DISTANCE * norm)  # false if the distance is NaN


def _counts(milliseconds: Sequence[float], once: float) -> list[int]:
    return [max(1, round(each / max(once, 1e-3))) for each in milliseconds]
