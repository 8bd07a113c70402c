"""Transfers in hardware queues of a GPU: a step ends although streams wait for each other, where a record says so.

A queue starts kernels in launch order, and stands still while the next kernel waits: a transfer for the computation
before it and for the one before it on its stream, a computation for the tensors it receives. A transfer that was
started ends when its counterpart has been started, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import pytest
from d9d_core.plugin import ScheduleSpec
from d9d_core.program.validation import placement
from d9d_core.registry.registry import Registry
from d9d_core.schedule import (
    Action,
    Program,
    ReceiveActivation,
    ReceiveGradient,
    Reduce,
    Schedule,
    SendActivation,
    SendGradient,
    WeightBackward,
    compute_parts,
)
from d9d_pipeline import plugin
from d9d_pipeline.schedule.insert_transfers import just_in_time

#: Queue of a transfer, by whether it is a send and whether its peer is a higher rank; computations are in queue 0.
Queues = dict[tuple[bool, bool], int]
MAPPINGS: list[Queues] = [
    dict(zip(product((True, False), repeat=2), chosen, strict=True)) for chosen in product((0, 1), repeat=4)
]


@dataclass(frozen=True)
class Launched:
    """Launches of a rank: a computation, which needs what others sent, or a transfer of ``what`` with a peer."""

    what: str = ""
    peer: int | None = None
    sends: bool = False
    needs: tuple[str, ...] = ()


def launches(programs: Sequence[Program]) -> list[list[Launched]]:
    """For each rank, in order; a receive where the program has it, or late, before the action that needs it."""
    hosts = {stage: rank for rank, stages in enumerate(placement(programs)) for stage in stages}
    return [list(_launches(p, hosts, late)) for p, late in zip(programs, just_in_time(programs), strict=True)]


def _launches(program: Program, hosts: dict[int, int], late: set[Action]) -> Iterator[Launched]:
    offers: dict[int, deque[str]] = {}
    arrives: dict[str, int] = {}

    def post(name: str) -> Iterator[Launched]:
        waiting = offers[arrives[name]]
        while name in waiting:
            yield Launched(waiting.popleft(), arrives[name])

    for action in program:
        if isinstance(action, ReceiveActivation | ReceiveGradient):
            forward = isinstance(action, ReceiveActivation)
            name, peer = _name(forward, action.stage, action.microbatch), hosts[action.stage + (-1 if forward else 1)]
            offers.setdefault(peer, deque()).append(name)
            arrives[name] = peer
            if action not in late:
                yield from post(name)
        elif isinstance(action, SendActivation | SendGradient):
            to = action.stage + (1 if isinstance(action, SendActivation) else -1)
            name = _name(isinstance(action, SendActivation), to, action.microbatch)
            yield Launched(name, hosts[to], sends=True)
        elif not isinstance(action, Reduce):
            parts = [part for part in compute_parts(action) if not isinstance(part, WeightBackward)]
            needs = [_name(type(part).__name__ == "Forward", part.stage, part.microbatch) for part in parts]
            needs = [name for name in needs if name in arrives]
            for name in needs:
                yield from post(name)
            yield Launched(needs=tuple(needs))


def _name(forward: bool, stage: int, microbatch: int) -> str:
    return f"{'F' if forward else 'B'}{stage}.{microbatch}"


def ends(programs: Sequence[Program], queues: Queues) -> bool:
    """Whether a step ends."""
    ranks = [Rank(number, order, queues) for number, order in enumerate(launches(programs))]
    moved = True
    while moved:
        moved = False
        for one, other in product(ranks, repeat=2):
            moved |= one.hand_over() | one.meet(other)
    return not any(queue for rank in ranks for queue in rank.queues)


class Rank:
    """A rank and its two hardware queues."""

    def __init__(self, number: int, order: Sequence[Launched], queues: Queues) -> None:
        self.queues: tuple[deque[tuple[Launched, list[Launched]]], ...] = (deque(), deque())
        self.done: set[Launched] = set()
        self.arrived: set[str] = set()
        self.sending: dict[str, Launched] = {}
        self.receiving: dict[str, Launched] = {}
        last: dict[object, Launched] = {}
        computed: list[Launched] = []
        for index, one in enumerate(order):
            stream = (one.peer, one.sends)
            after = [last[stream]] if stream in last else []
            if one.peer is None:
                one = Launched(f"computation {index}", needs=one.needs)  # noqa: PLW2901 - each is another one
                computed = [one]
                queue = 0
            else:
                after += computed
                queue = queues[one.sends, one.peer > number]
            last[stream] = one
            self.queues[queue].append((one, after))

    def hand_over(self) -> bool:
        """Hand over what waits for nothing; whether there was any."""
        moved = False
        for queue in self.queues:
            while queue and self.arrived.issuperset(queue[0][0].needs) and self.done.issuperset(queue[0][1]):
                one, _ = queue.popleft()
                moved = True
                if one.peer is None:
                    self.done.add(one)
                else:
                    (self.sending if one.sends else self.receiving)[one.what] = one
        return moved

    def meet(self, other: Rank) -> bool:
        """End what this rank sends and the other one receives; whether there was any."""
        met = self.sending.keys() & other.receiving.keys()
        for what in met:
            self.done.add(self.sending.pop(what))
            other.done.add(other.receiving.pop(what))
            other.arrived.add(what)
        return bool(met)


SPECS = {entry.spec.name: entry.spec for entry in Registry.of(plugin).entries("schedule")}


@pytest.mark.thorough
@pytest.mark.parametrize("name", SPECS)
def test_a_step_ends_in_whichever_queues_the_transfers_of_an_ordered_schedule_are(name: str) -> None:
    spec = SPECS[name]
    assert isinstance(spec, ScheduleSpec)
    schedule: Schedule = spec.build.load()(spec.config.load()(name=name))
    stuck = [
        (ranks, count, queues)
        for ranks, count in ((2, 4), (2, 7), (3, 6), (4, 8))
        for queues in MAPPINGS
        if not ends(schedule(ranks, count), queues)
    ]
    assert bool(stuck) == (name == "dual_pipe_v")  # whose pairs send to each other at once
    assert not (stuck and spec.ordered_transfers)


def test_only_a_schedule_that_has_run_so_on_gpus_is_declared_ordered() -> None:
    assert [name for name, spec in SPECS.items() if getattr(spec, "ordered_transfers", False)] == ["1f1b"]
