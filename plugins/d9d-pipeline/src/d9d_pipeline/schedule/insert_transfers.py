"""Pass that completes orders of computation to programs: it adds sends, receives and reductions."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from math import inf

from d9d_core.schedule import (
    Action,
    Backward,
    Forward,
    InputBackward,
    Overlap,
    Program,
    ReceiveActivation,
    ReceiveGradient,
    Reduce,
    SendActivation,
    SendGradient,
    WeightBackward,
    compute_parts,
)

from d9d_pipeline.schedule.ideal_timing import ideal_starts
from d9d_pipeline.schedule.placement import Placement


def insert_transfers(orders: Sequence[Iterable[Action]], placement: Placement) -> list[Program]:
    """Insert transfers: add sends, receives and reductions to the orders of computation of all ranks.

    - A tensor is sent right after the action that computes it.
    - It is received (memory for it is offered) at the expected time of the send, and at the latest one computation
      before it is needed, so that it can arrive while the rank computes. It is received earlier if a tensor that is
      sent later is needed sooner, because both ranks must transfer tensors in the same order.
    - A stage reduces its gradients right after the last of them is computed.

    Neighbouring stages of one rank hand tensors over without sending them.

    Args:
        orders: forwards and backwards of each rank, in order.
        placement: stages of each rank.
    """
    computes = [tuple(order) for order in orders]
    hosts = {stage: rank for rank, stages in enumerate(placement) for stage in stages}
    begins = ideal_starts(computes)
    sends, channels = _sends(computes, hosts)
    offers = _offers(begins, channels)
    programs = []
    for rank, order in enumerate(computes):
        reduces: dict[int, list[Action]] = {}
        for stage, at in _last_gradients(order).items():
            reduces.setdefault(at, []).append(Reduce(stage))
        program: list[Action] = []
        for at, action in enumerate(order):
            program += offers[rank].get(at, ())
            program.append(action)
            program += sends[rank].get(at, ())
            program += reduces.get(at, ())
        programs.append(tuple(program))
    return programs


def just_in_time(programs: Sequence[Program]) -> list[set[Action]]:
    """Receives of each rank whose tensors are not expected to arrive before they are needed.

    Posting these receives earlier is not expected to save time.
    """
    computes = [tuple(a for a in program if isinstance(a, _COMPUTATIONS)) for program in programs]
    hosts = {part.stage: r for r, order in enumerate(computes) for action in order for part in compute_parts(action)}
    begins = ideal_starts(computes)
    found: list[set[Action]] = [set() for _ in programs]
    for (source, target), arrivals in _sends(computes, hosts)[1].items():
        for receive, sender, user in arrivals:
            if bisect_left(begins[target], _sent(begins[source], sender)) >= user:
                found[target].add(receive)
    return found


_COMPUTATIONS = (Forward, Backward, InputBackward, WeightBackward, Overlap)
#: For each rank: index of a computation -> actions to insert before or after it.
_Insertions = list[dict[int, list[Action]]]
#: Source and target rank -> for each transfer, in order of sending: its receive, the index of the sending computation
#: on its rank, and of the computation that needs the tensor.
_Channels = dict[tuple[int, int], list[tuple[Action, int, int]]]


def _sends(computes: Sequence[Program], hosts: dict[int, int]) -> tuple[_Insertions, _Channels]:
    """Sends to insert after each computation, and the resulting transfers of each pair of ranks."""
    forwards: dict[tuple[int, int], int] = {}
    backwards: dict[tuple[int, int], int] = {}
    sends: _Insertions = [{} for _ in computes]
    arrivals: dict[tuple[int, int], list[tuple[bool, int, int, int]]] = {}
    for rank, order in enumerate(computes):
        for at, action in enumerate(order):
            for part in (action,) if type(action) is not Overlap else compute_parts(action):
                kind = type(part)
                if kind is WeightBackward:
                    continue
                stage, microbatch = part.stage, part.microbatch  # type: ignore[attr-defined]
                ahead = kind is Forward
                (forwards if ahead else backwards)[stage, microbatch] = at
                peer = stage + 1 if ahead else stage - 1
                target = hosts.get(peer, rank)
                if target != rank:
                    send = SendActivation if ahead else SendGradient
                    sends[rank].setdefault(at, []).append(send(stage, microbatch))
                    arrivals.setdefault((rank, target), []).append((ahead, peer, microbatch, at))
    channels: _Channels = {}
    for channel in sorted(arrivals):
        channels[channel] = [
            (ReceiveActivation(stage, microbatch), at, forwards[stage, microbatch])
            if ahead
            else (ReceiveGradient(stage, microbatch), at, backwards[stage, microbatch])
            for ahead, stage, microbatch, at in arrivals[channel]
        ]
    return sends, channels


def _offers(begins: Sequence[Sequence[float]], channels: _Channels) -> _Insertions:
    """Receives to insert before each computation of each rank."""
    offers: _Insertions = [{} for _ in begins]
    for (source, target), arrivals in channels.items():
        there, here = begins[source], begins[target]
        latest = len(here)
        places = []
        for _, sender, user in reversed(arrivals):
            # A later receive would save memory, but a rank that can send only one tensor ahead would wait.
            latest = min(latest, max(0, user - 1), bisect_left(here, _sent(there, sender)))
            places.append(latest)
        for (receive, _, _), place in zip(arrivals, reversed(places), strict=True):
            offers[target].setdefault(place, []).append(receive)
    return offers


def _sent(begins: Sequence[float], sender: int) -> float:
    """Time when a computation's result is sent: the start of the next computation."""
    return begins[sender + 1] if sender + 1 < len(begins) else inf


def _last_gradients(order: Program) -> dict[int, int]:
    """Index of the last gradient computation of each stage."""
    return {
        part.stage: at
        for at, action in enumerate(order)
        for part in compute_parts(action)
        if not isinstance(part, Forward)
    }
