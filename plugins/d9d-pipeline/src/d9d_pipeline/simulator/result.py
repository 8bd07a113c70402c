"""Result of a simulation: times, bubbles, memory and the critical path of a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from d9d_core.program.index import ProgramIndex
from d9d_core.schedule import Action, Backward, Forward, InputBackward, Overlap, WeightBackward

_COMPUTES = (Forward, Backward, InputBackward, WeightBackward, Overlap)


class Span(NamedTuple):
    """Start and end of one computation."""

    action: Action
    begin: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """Result of a simulation: times and quantities of one step.

    Attributes:
        peak_live: rank -> most activations held at any time; 1 is one microbatch through all stages of a rank.
        inbox: rank -> largest number of tensors that have a posted receive and that no computation has used yet.
    """

    peak_live: Sequence[float]
    inbox: Sequence[int]
    index: ProgramIndex = field(repr=False)
    begins: Sequence[float] = field(repr=False)
    ends: Sequence[float] = field(repr=False)
    arrivals: Sequence[float] = field(repr=False)
    causes: Sequence[int] = field(repr=False)

    @property
    def ranks(self) -> int:
        """Number of pipeline ranks."""
        return len(self.index.programs)

    def stages(self, rank: int) -> list[int]:
        """Stages of a rank, in the order in which a microbatch passes through them."""
        return [stage for stage, host in enumerate(self.index.hosts) if host == rank]

    @cached_property
    def makespan(self) -> float:
        """Time from the start of the step to the end of the last action of any rank."""
        return max(self.ends, default=0.0)

    def spans(self, rank: int) -> Iterator[Span]:
        """Computations of a rank, in order."""
        first = self.index.first[rank]
        for number, action in enumerate(self.index.programs[rank], first):
            if isinstance(action, _COMPUTES):
                yield Span(action, self.begins[number], self.ends[number])

    @cached_property
    def busy(self) -> list[float]:
        """Time that each rank computes."""
        return [sum(span.end - span.begin for span in self.spans(rank)) for rank in range(self.ranks)]

    @cached_property
    def bubble(self) -> float:
        """Idle fraction of the step, averaged over ranks; warm-up and cool-down included."""
        total = self.ranks * self.makespan
        return 1 - sum(self.busy) / total if total else 0.0

    @cached_property
    def inner_bubble(self) -> float:
        """Idle fraction of the time between a rank's first and last computation, on the idlest rank.

        Papers on zero bubbles report this number: they assume that a rank begins the next step as soon as it is done.
        """
        idlest = 0.0
        for rank in range(self.ranks):
            spans = list(self.spans(rank))
            lasts = spans[-1].end - spans[0].begin if spans else 0.0
            idlest = max(idlest, 1 - self.busy[rank] / lasts if lasts else 0.0)
        return idlest

    @cached_property
    def sent(self) -> list[int]:
        """Number of tensors that each rank sends to other ranks."""
        counts = [0] * self.ranks
        for (source, _), pairs in self.index.channels().items():
            counts[source] += len(pairs)
        return counts

    @property
    def volume(self) -> int:
        """Number of tensors sent between ranks in the whole step."""
        return sum(self.sent)

    @cached_property
    def critical_path(self) -> list[Action]:
        """Computations and sends that determine the time of the step, in order: each starts when the previous one ends.

        If one of them took longer, the whole step would take longer.
        """
        number = max(range(len(self.ends)), key=self.ends.__getitem__, default=-1)
        sends = {send: (receive, before) for send, receive, before in self._transfers()}
        path: list[Action] = []
        while number != -1:
            if number >= 0:
                action = self.index.action(number)
                if isinstance(action, _COMPUTES):
                    path.append(action)
                number = self.causes[number]
                continue
            send = ~number  # the action waited for the transfer of this send
            receive, before = sends[send]
            path.append(self.index.action(send))
            issued = max(self.ends[send], self.ends[receive])
            if before >= 0 and self.arrivals[before] > issued:
                number = ~before
            else:
                number = send if self.ends[send] >= self.ends[receive] else receive
        return path[::-1]

    def _transfers(self) -> Iterator[tuple[int, int, int]]:
        for pairs in self.index.channels().values():
            before = -1
            for send, receive in pairs:
                yield send, receive, before
                before = send
