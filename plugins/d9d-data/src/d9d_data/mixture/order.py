"""Order of the parts of a mixture: which part gives a sample, and which of its samples that is.

Samples are assigned so that at any moment each part has given its share, off by less than one sample: the chairman
assignment problem (Tijdeman, The chairman assignment problem, Discrete Mathematics 32, 1980). With whole weights of sum
W the assignment repeats after W samples, so any place is reached at once. Where a part ends, the others begin anew with
their own weights.

Shapes: W places of a pattern.
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
#: Samples after which the assignment repeats, at most: a table has an entry for each.
MAX_PERIOD = 1 << 16


class MixtureOrder:
    """Order of a mixture: assignment of its samples to its parts; endless, and without memory of what came before.

    Args:
        weights: of the parts.
        limits: samples that a part gives before it ends; ``None`` for one without end. Where all parts end, the mixture
            begins again, and each goes on in its own order.

    Raises:
        DataError: the weights are so uneven that no short pattern has their proportions.
    """

    def __init__(self, weights: Sequence[float], limits: Sequence[int | None]) -> None:
        self._limits = tuple(limits)
        self._segments = list(_segments(whole_weights(weights), self._limits))
        self._firsts = [segment.first for segment in self._segments]
        given = [limit for limit in limits if limit is not None]
        #: Samples until all parts have ended; ``None`` if one never does.
        self.samples: int | None = sum(given) if len(given) == len(self._limits) else None

    def __call__(self, number: int) -> tuple[int, int]:
        """Part that gives a sample of the mixture, and the place of the sample in that part's own order.

        Args:
            number: of the sample in the mixture, from 0.
        """
        cycle, number = (0, number) if self.samples is None else divmod(number, self.samples)
        segment = self._segments[bisect_right(self._firsts, number) - 1]
        part, place = segment.find(number - segment.first)
        return part, cycle * (self._limits[part] or 0) + place


@dataclass(frozen=True, slots=True)
class _Segment:
    """Samples during which no part ends.

    Attributes:
        first: number of the first.
        parts: those that take part.
        weights: of these.
        pattern: int64 [W], index of the part in ``parts`` at each place.
        before: int64 [W], how often it has been in the pattern before.
        given: samples that each of these has given before the segment.
    """

    first: int
    parts: tuple[int, ...]
    weights: tuple[int, ...]
    pattern: Int64
    before: Int64
    given: tuple[int, ...]

    def find(self, offset: int) -> tuple[int, int]:
        """Part at a place of the segment, and the place in the part's order."""
        period, place = divmod(offset, len(self.pattern))
        index = int(self.pattern[place])
        return self.parts[index], self.given[index] + period * self.weights[index] + int(self.before[place])

    def place_of(self, index: int, count: int) -> int:
        """Place in the segment at which a part gives its ``count``-th sample, from 1."""
        period, rest = divmod(count - 1, self.weights[index])
        return period * len(self.pattern) + int(np.flatnonzero(self.pattern == index)[rest])

    def count(self, index: int, length: int) -> int:
        """Samples that a part gives in the first ``length`` of the segment."""
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
    """Smallest whole numbers in the proportions of some weights, as the job file writes these.

    Raises:
        DataError: their sum is above :data:`MAX_PERIOD`.
    """
    exact = [Fraction(str(weight)) for weight in weights]
    common = math.lcm(*(weight.denominator for weight in exact))
    whole = _reduced([int(weight * common) for weight in exact])
    if sum(whole) > MAX_PERIOD:
        raise DataError(
            f"data.parts: the weights {', '.join(map(str, weights))} are in proportion only after "
            f"{sum(whole):,} samples, and at most {MAX_PERIOD:,} can be planned; round them"
        )
    return whole


def _reduced(weights: Sequence[int]) -> tuple[int, ...]:
    divisor = math.gcd(*weights)
    return tuple(weight // divisor for weight in weights)


def assign(weights: Sequence[int]) -> Int64:
    """Order of a mixture: assign W places to parts, W being the sum of the weights.

    After n places part i has had n w_i / W of them, off by at most 1 - 1 / (2k - 2) for k parts: of the parts that may
    have one more, the one comes first that must have it soonest.

    Returns:
        The part of each place, [W].
    """
    total, parts = sum(weights), range(len(weights))
    pattern, had = np.zeros(total, dtype=np.int64), [0] * len(weights)
    bound = max(1, 2 * len(weights) - 2)
    for place in range(total):
        # What each part is owed, times W and the bound, so that all is whole.
        owed = [bound * (weights[part] * (place + 1) - had[part] * total) for part in parts]
        may = [part for part in parts if owed[part] >= total] or list(parts)
        chosen = min(may, key=lambda part: ((bound - 1) * total - owed[part]) / weights[part])
        pattern[place] = chosen
        had[chosen] += 1
    return pattern
