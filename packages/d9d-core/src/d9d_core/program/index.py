"""Index of the actions of all ranks' programs: positions, and the receive that matches each send. Imports no torch.

Actions are numbered consecutively over all programs, rank after rank, so that an index of a million actions consists of
a few lists of integers. Comparing the numbers of two actions of one rank compares their positions in its program.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from d9d_core.schedule import (
    Action,
    MicrobatchAction,
    Overlap,
    Program,
    ReceiveActivation,
    ReceiveGradient,
    Reduce,
    SendActivation,
    SendGradient,
    count_stages,
)

__all__ = ["ProgramIndex"]

#: Sending and receiving rank of a channel.
Channel = tuple[int, int]


@dataclass
class ProgramIndex:
    """Index of the actions in the programs of all ranks, by number.

    Attributes:
        programs: programs of all ranks.
        stages: number of stages.
        microbatches: number of microbatches.
        first: number of each rank's first action, followed by the total number of actions.
        nodes: action type -> numbers of its actions, at index ``stage * microbatches + microbatch``; -1 if absent.
        reduces: number of the :class:`~d9d_core.schedule.Reduce` action of each stage; -1 if absent.
        hosts: rank that computes each stage; -1 if none does.
        problems: messages about repeated actions, invalid indices, and stages on several ranks.
    """

    programs: Sequence[Program]
    stages: int
    microbatches: int
    first: list[int] = field(default_factory=lambda: [0])
    nodes: dict[type[Action], list[int]] = field(default_factory=dict)
    reduces: list[int] = field(default_factory=list)
    hosts: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @classmethod
    def of(
        cls, programs: Sequence[Program], stages: int | None = None, microbatches: int | None = None
    ) -> ProgramIndex:
        """Number all actions; stages and microbatches are counted if not given."""
        if microbatches is None:
            of_one = (a for program in programs for a in program if isinstance(a, MicrobatchAction | Overlap))
            microbatches = 1 + max((_microbatch(action) for action in of_one), default=-1)
        index = cls(programs, count_stages(programs) if stages is None else stages, microbatches)
        index.reduces = [-1] * index.stages
        index.hosts = [-1] * index.stages
        for rank, program in enumerate(programs):
            index._add(rank, program)
        return index

    def _add(self, rank: int, program: Program) -> None:
        number = self.first[-1]
        for action in program:
            kind: type[Action] = type(action)
            if kind is Overlap:
                assert isinstance(action, Overlap)
                self._place(type(action.forward), action.forward, number, rank)
                self._place(type(action.backward), action.backward, number, rank)
            elif isinstance(action, MicrobatchAction):
                self._place(kind, action, number, rank)
            elif kind is Reduce:
                self._place_reduce(action, number, rank)
            number += 1
        self.first.append(number)

    def _place(self, kind: type[Action], action: MicrobatchAction, number: int, rank: int) -> None:
        stage, microbatch = action.stage, action.microbatch
        if not 0 <= microbatch < self.microbatches:
            self.problems.append(f"{action} on rank {rank}: there are only {self.microbatches} microbatches")
            return
        if not 0 <= stage < self.stages:
            self.problems.append(f"{action} on rank {rank}: there are only {self.stages} stages")
            return
        numbers = self.nodes.get(kind)
        if numbers is None:
            numbers = self.nodes[kind] = [-1] * (self.stages * self.microbatches)
        at = stage * self.microbatches + microbatch
        if numbers[at] >= 0:
            self._report_duplicate(action, numbers[at], rank)
        else:
            numbers[at] = number
        self._check_host(action, rank)

    def _place_reduce(self, action: Action, number: int, rank: int) -> None:
        if not 0 <= action.stage < self.stages:
            self.problems.append(f"{action} on rank {rank}: there are only {self.stages} stages")
        elif self.reduces[action.stage] >= 0:
            self._report_duplicate(action, self.reduces[action.stage], rank)
        else:
            self.reduces[action.stage] = number
            self._check_host(action, rank)

    def _report_duplicate(self, action: Action, number: int, rank: int) -> None:
        self.problems.append(f"{action} appears twice, on rank {self.rank(number)} and rank {rank}; remove one")

    def _check_host(self, action: Action, rank: int) -> None:
        host = self.hosts[action.stage]
        if host < 0:
            self.hosts[action.stage] = rank
        elif host != rank:
            found = next(str(a) for a in self.programs[host] if a.stage == action.stage)
            text = f"{found} is on rank {host} but {action} on rank {rank}: keep all actions of a stage on one rank"
            self.problems.append(text)

    def rank(self, number: int) -> int:
        """Rank of an action, by the action's number."""
        if number >= self.first[-1]:
            return len(self.first) - 1
        return bisect_right(self.first, number) - 1

    def action(self, number: int) -> Action:
        """Action that has the given number."""
        rank = self.rank(number)
        return self.programs[rank][number - self.first[rank]]

    def table(self, kind: type[Action]) -> list[int]:
        """Numbers of the actions of one type, at ``stage * microbatches + microbatch``; -1 if absent."""
        return self.nodes.get(kind) or [-1] * (self.stages * self.microbatches)

    def channels(self) -> dict[Channel, list[tuple[int, int]]]:
        """Channel (sending and receiving rank) -> pairs of numbers (send, its receive), in the order of the sends."""
        found: dict[Channel, list[tuple[int, int]]] = {}
        size = self.microbatches
        for send, receive, step in (
            (SendActivation, ReceiveActivation, 1),
            (SendGradient, ReceiveGradient, -1),
        ):
            sends, receives = self.table(send), self.table(receive)
            for stage in range(self.stages):
                peer = stage + step
                if 0 <= peer < self.stages and self.hosts[stage] != self.hosts[peer]:
                    pairs = zip(
                        sends[stage * size : (stage + 1) * size], receives[peer * size : (peer + 1) * size], strict=True
                    )
                    found.setdefault((self.hosts[stage], self.hosts[peer]), []).extend(pairs)
        return {channel: sorted(found[channel]) for channel in sorted(found)}


def _microbatch(action: MicrobatchAction | Overlap) -> int:
    if isinstance(action, Overlap):
        return max(action.forward.microbatch, action.backward.microbatch)
    return action.microbatch
