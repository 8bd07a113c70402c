"""Simulation of programs in discrete events."""

from __future__ import annotations

from collections.abc import Sequence

from d9d_core.errors import BuildError
from d9d_core.program.deadlock import awaited, find_deadlock
from d9d_core.program.index import ProgramIndex
from d9d_core.program.validation import problems_of
from d9d_core.schedule import Action, Overlap, Program

from d9d_pipeline.simulator.costs import Costs, of_stages
from d9d_pipeline.simulator.memory import inbox, live
from d9d_pipeline.simulator.result import Simulation


def simulate(
    programs: Sequence[Program],
    costs: Costs | None = None,
    *,
    buffers: int | None = None,
    training: bool = True,
) -> Simulation:
    """Simulate the programs of all ranks; each action starts as soon as its rank and its inputs are ready.

    A rank runs one computation at a time. A transfer starts when its tensor is sent, its receive is posted and the
    previous transfer between the same ranks in this direction has ended; only the computation that needs the tensor
    waits for it. Each action is processed once.

    Args:
        programs: programs of all ranks.
        costs: times; by default a backward takes twice as long as a forward, and communication takes no time.
        buffers: largest number of tensors in transit from one rank to another; a further send waits. ``None`` for no
            limit.
        training: whether there are backwards.

    Raises:
        BuildError: the programs are invalid or deadlock; the message names the actions.
        ValueError: costs are given for another number of stages.
    """
    costs = costs or Costs()
    events = timed(programs, costs, buffers=buffers, training=training)
    memory = of_stages(costs.memory, events.index, "memory")
    return Simulation(
        index=events.index,
        begins=events.begins,
        ends=events.ends,
        arrivals=events.arrivals,
        causes=events.causes,
        peak_live=[live(program, memory, training) for program in programs],
        inbox=[inbox(program) for program in programs],
    )


def timed(programs: Sequence[Program], costs: Costs, *, buffers: int | None = None, training: bool = True) -> EventLoop:
    """Simulate times only, without memory; see :func:`simulate`.

    Raises:
        BuildError: the programs are invalid or deadlock; the message names the actions.
        ValueError: costs are given for another number of stages.
    """
    index = ProgramIndex.of(programs)
    if problems := problems_of(index, training):
        raise BuildError(f"pipeline: invalid programs: {'; '.join(problems[:5])}")
    events = EventLoop(index, costs, buffers)
    if not events.run():
        raise BuildError(f"pipeline: {find_deadlock(index, buffers)}")
    return events


class EventLoop:
    """Event loop of a simulation; holds the times of all actions, by the index of the action."""

    def __init__(self, index: ProgramIndex, costs: Costs, buffers: int | None) -> None:
        count = index.first[-1]
        self.begins: list[float] = [0.0] * count
        self.ends: list[float] = [0.0] * count
        #: Index of a send or its receive -> arrival time of the tensor; negative while unknown.
        self.arrivals: list[float] = [-1.0] * count
        #: Index of an action -> what its start waited for: the index of another action, or ``~index`` of a send whose
        #: tensor arrived late.
        self.causes: list[int] = [number - 1 for number in range(count)]
        self.index = index
        self._durations = costs.durations(index)
        self._transfer = costs.transfer
        self._hidden = costs.overlap
        self._needs = awaited(index, buffers)
        #: Index of a send or receive -> indices of the send, of the receive, and of the previous send between the same
        #: ranks in this direction (or -1).
        self._pairs: dict[int, tuple[int, int, int]] = {}
        for pairs in index.channels().values():
            before = -1
            for send, receive in pairs:
                self._pairs[send] = self._pairs[receive] = (send, receive, before)
                before = send
        self._issued = bytearray(count)

    def run(self) -> bool:
        """Run all programs; returns whether all of them ended."""
        index, needs, pairs, arrivals = self.index, self._needs, self._pairs, self.arrivals
        begins, ends, causes = self.begins, self.ends, self.causes
        ranks = len(index.programs)
        place, clocks = index.first[:ranks], [0.0] * ranks
        for first in place:
            if first < len(causes):
                causes[first] = -1
        waiting: dict[int, int] = {}
        ready = list(range(ranks))
        while ready:
            rank = ready.pop()
            clock, offset = clocks[rank], index.first[rank]
            program = index.programs[rank]
            for number in range(place[rank], index.first[rank + 1]):
                begin = clock
                for other in needs.get(number, ()):
                    arrival = arrivals[other]
                    if arrival < 0:
                        waiting[other] = rank
                        break
                    if arrival > begin:
                        begin = arrival
                        causes[number] = ~pairs[other][0]
                else:
                    begins[number] = begin
                    pair = pairs.get(number)
                    if pair is None:
                        begin += self._duration(program[number - offset])
                    elif self._issue(number, begin, pair):
                        ready += (waiting.pop(side) for side in pair[:2] if side in waiting)
                    ends[number] = clock = begin
                    continue
                break
            else:
                number = index.first[rank + 1]
            place[rank], clocks[rank] = number, clock
        return place == index.first[1:]

    def _issue(self, number: int, time: float, pair: tuple[int, int, int]) -> bool:
        """Record the time when one side of a transfer is ready; returns whether both sides are."""
        send, receive, before = pair
        self.ends[number] = time
        self._issued[number] = 1
        if not (self._issued[send] and self._issued[receive]):
            return False
        # The later of both times counts: the side that is processed last may have been ready first.
        start = max(self.ends[send], self.ends[receive], self.arrivals[before] if before >= 0 else 0.0)
        self.arrivals[send] = self.arrivals[receive] = start + self._transfer
        return True

    def _duration(self, action: Action) -> float:
        kind = type(action)
        if kind in self._durations:
            return self._durations[kind][action.stage]
        if isinstance(action, Overlap):
            forward, backward = self._duration(action.forward), self._duration(action.backward)
            return forward + backward - self._hidden * min(forward, backward)
        return 0.0
