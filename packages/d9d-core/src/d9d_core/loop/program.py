"""What one rank does in one optimizer step, as data: frozen actions, checked before they run. Imports no torch.

The program of a single stage is forward and backward of each microbatch in turn, then the reduction; gradient
accumulation is the same program with more microbatches. Pipeline schedules are other generators of such programs, and
bring action types of their own. The optimizer step is no action: it is one line of the training step, after all
programs have ended, because clipping needs the gradients of every stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Action:
    """Base of all actions."""

    stage: int


@dataclass(frozen=True, slots=True)
class Forward(Action):
    """Run a stage on one microbatch; on the last stage, compute the loss too."""

    microbatch: int

    def __str__(self) -> str:
        return f"F{self.stage}.{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Backward(Action):
    """Compute the gradients of one microbatch."""

    microbatch: int

    def __str__(self) -> str:
        return f"B{self.stage}.{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Reduce(Action):
    """All gradients of a stage are there: reductions over other ranks may start."""

    def __str__(self) -> str:
        return f"R{self.stage}"


#: The actions of one rank, in order.
Program = tuple[Action, ...]


class Schedule(Protocol):
    """A program generator: a pure function, so that programs can be printed, checked and simulated without a GPU."""

    def __call__(self, stages: int, microbatches: int) -> Sequence[Program]:
        """One program per pipeline rank."""
        ...


def single_stage(stages: int, microbatches: int) -> Sequence[Program]:
    """The program of a model that is not split.

    Raises:
        ValueError: there are several stages.
    """
    if stages != 1:
        raise ValueError(f"the single-stage program runs one stage, not {stages}; choose a pipeline schedule")
    steps = [action for index in range(microbatches) for action in (Forward(0, index), Backward(0, index))]
    return [(*steps, Reduce(0))]


def validate(programs: Sequence[Program], stages: int, microbatches: int) -> list[str]:
    """What is wrong with the programs of all ranks together; an empty list if nothing is.

    Every stage runs each microbatch forward once and backward once, in that order and on one rank, and reduces once,
    after its last backward.
    """
    problems = []
    place: dict[Action, tuple[int, int]] = {}
    for rank, program in enumerate(programs):
        for position, action in enumerate(program):
            if action in place:
                problems.append(f"{action} appears twice, on rank {place[action][0]} and rank {rank}")
            place[action] = (rank, position)
            if isinstance(action, Forward | Backward) and not 0 <= action.microbatch < microbatches:
                problems.append(f"{action} on rank {rank}: there are only {microbatches} microbatches")
            if not 0 <= action.stage < stages:
                problems.append(f"{action} on rank {rank}: there are only {stages} stages")
    for stage in range(stages):
        problems += _validate_stage(place, stage, microbatches)
    return problems


def _validate_stage(place: dict[Action, tuple[int, int]], stage: int, microbatches: int) -> list[str]:
    problems = []
    reduce = place.get(Reduce(stage))
    if reduce is None:
        problems.append(f"{Reduce(stage)} is missing")
    for microbatch in range(microbatches):
        forward, backward = Forward(stage, microbatch), Backward(stage, microbatch)
        missing = [str(action) for action in (forward, backward) if action not in place]
        if missing:
            problems.append(f"{' and '.join(missing)} missing")
            continue
        before, after = place[forward], place[backward]
        if before[0] != after[0]:
            problems.append(f"{forward} is on rank {before[0]} but {backward} on rank {after[0]}")
        elif before[1] > after[1]:
            problems.append(f"{backward} comes before {forward}")
        if reduce is not None and reduce[0] == after[0] and reduce[1] < after[1]:
            problems.append(f"{Reduce(stage)} comes before {backward}")
    return problems
