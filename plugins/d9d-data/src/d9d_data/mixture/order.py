"""Order of a mixture of datasets (its parts): the part that each sample comes from, and the sample's index in it.

Samples are assigned so that at any moment the number of samples from each part differs by less than one from the part's
share (Tijdeman, The chairman assignment problem, Discrete Mathematics 32, 1980). With integer weights of
sum W the assignment repeats after W samples, so the assignment of any sample is found directly. When a part ends, a new
assignment begins with the weights of the remaining parts.

Shapes: W samples of the repeating pattern.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt
from d9d_core.errors import DataError

Int64 = npt.NDArray[np.int64]
#: Longest period of the assignment in samples; a table has an entry for each sample of a period.
MAX_PERIOD = 1 << 16


class MixtureOrder:
    """Order of a mixture: assigns each sample to a part by the sample's index alone; the order is endless.

    Args:
        weights: weights of the parts.
        limits: number of samples that a part gives before it ends; ``None`` for a part without end. When all parts have
            ended, the mixture begins again, and each part continues in its own order.

    Raises:
        DataError: the weights are so uneven that no pattern of at most :data:`MAX_PERIOD` samples has their ratio.
    """

    def __init__(self, weights: Sequence[float], limits: Sequence[int | None]) -> None:
        self._limits = tuple(limits)
        self._segments = list(_segments(whole_weights(weights), self._limits))
        self._firsts = [segment.first for segment in self._segments]
        given = [limit for limit in limits if limit is not None]
        #: Number of samples until all parts have ended; ``None`` if a part never ends.
        self.samples: int | None = sum(given) if len(given) == len(self._limits) else None

    def __call__(self, number: int) -> tuple[int, int]:
        """Part of a sample of the mixture, and the sample's index in that part's own order.

        Args:
            number: index of the sample in the mixture, from 0.
        """
        cycle, number = (0, number) if self.samples is None else divmod(number, self.samples)
        segment = self._segments[bisect_right(self._firsts, number) - 1]
        part, place = segment.find(number - segment.first)
        return part, cycle * (self._limits[part] or 0) + place


@dataclass(frozen=True, slots=True)
class _Segment:
    """Consecutive samples of the mixture that come from the same set of parts: no part ends between them.

    Their assignment to parts repeats every W samples, W being the sum of ``weights``.

    Attributes:
        first: index in the mixture of the first of these samples.
        parts: indices of the parts (datasets) that have not ended.
        weights: integer weight of each of these parts: its number of samples among W.
        pattern: int64 [W], index into ``parts`` of each sample of a period.
        before: int64 [W], number of earlier samples of the same part in the period.
        given: number of samples that each of these parts gave before this segment.
    """

    first: int
    parts: tuple[int, ...]
    weights: tuple[int, ...]
    pattern: Int64
    before: Int64
    given: tuple[int, ...]

    def find(self, offset: int) -> tuple[int, int]:
        """Part of the sample at an offset from ``first``, and the sample's index in that part."""
        period, place = divmod(offset, len(self.pattern))
        index = int(self.pattern[place])
        return self.parts[index], self.given[index] + period * self.weights[index] + int(self.before[place])

    def place_of(self, index: int, count: int) -> int:
        """Offset from ``first`` of the ``count``-th sample (from 1) that part ``parts[index]`` gives."""
        period, rest = divmod(count - 1, self.weights[index])
        return period * len(self.pattern) + int(np.flatnonzero(self.pattern == index)[rest])

    def count(self, index: int, length: int) -> int:
        """Number of samples that part ``parts[index]`` gives among the first ``length`` samples."""
        period, rest = divmod(length, len(self.pattern))
        return period * self.weights[index] + int(np.count_nonzero(self.pattern[:rest] == index))


def _segments(weights: Sequence[int], limits: Sequence[int | None]) -> Iterator[_Segment]:
    given, first = [0] * len(weights), 0
    while True:
        active = tuple(part for part, limit in enumerate(limits) if limit is None or given[part] < limit)
        if not active:
            return
        own = _reduced([weights[part] for part in active])
        pattern = assign(own)
        before = np.zeros_like(pattern)
        for index in range(len(active)):
            here = pattern == index
            before[here] = np.arange(np.count_nonzero(here))
        segment = _Segment(first, active, own, pattern, before, tuple(given[part] for part in active))
        yield segment
        left = [(i, limit - given[part]) for i, part in enumerate(active) if (limit := limits[part]) is not None]
        if not left:
            return
        length = min(segment.place_of(index, count) for index, count in left) + 1
        for index, part in enumerate(active):
            given[part] += segment.count(index, length)
        first += length


def whole_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Convert weights, read as decimal numbers, to the smallest integers of the same ratio.

    Raises:
        DataError: the sum of the integers is above :data:`MAX_PERIOD`.
    """
    exact = [Fraction(str(weight)) for weight in weights]
    common = math.lcm(*(weight.denominator for weight in exact))
    whole = _reduced([int(weight * common) for weight in exact])
    if sum(whole) > MAX_PERIOD:
        raise DataError(
            f"data.parts: the weights {', '.join(map(str, weights))} have a period of "
            f"{sum(whole):,} samples, above the limit of {MAX_PERIOD:,}; round them"
        )
    return whole


def _reduced(weights: Sequence[int]) -> tuple[int, ...]:
    divisor = math.gcd(*weights)
    return tuple(weight // divisor for weight in weights)


def assign(weights: Sequence[int]) -> Int64:
    """Assign the W samples of a period to parts; W is the sum of the weights.

    After n samples, the number of samples from part i differs from n w_i / W by at most 1 - 1 / (2k - 2) for k parts.
    Each sample is taken from the part with the earliest deadline among the parts that may give one more sample.

    Returns:
        The part of each sample, [W].
    """
    total, parts = sum(weights), range(len(weights))
    pattern, had = np.zeros(total, dtype=np.int64), [0] * len(weights)
    bound = max(1, 2 * len(weights) - 2)
    for place in range(total):
        # Each part's deficit in samples, times W and ``bound``, so that the arithmetic stays in integers.
        owed = [bound * (weights[part] * (place + 1) - had[part] * total) for part in parts]
        may = [part for part in parts if owed[part] >= total] or list(parts)
        chosen = min(may, key=lambda part: ((bound - 1) * total - owed[part]) / weights[part])
        pattern[place] = chosen
        had[chosen] += 1
    return pattern
