"""Pipeline schedules: the actions of each rank in one optimizer step, as frozen data. Imports no torch.

Start here: a :class:`Schedule` is a function from the numbers of ranks and microbatches to a :data:`Program` per rank::

    from d9d_core.schedule import Backward, Forward, ReceiveActivation, ReceiveGradient, Reduce
    from d9d_core.schedule import SendActivation, SendGradient

    def all_forward_all_backward(ranks, microbatches):
        def program(rank):
            for m in range(microbatches):
                yield from [ReceiveActivation(rank, m)] if rank else []
                yield Forward(rank, m)
                yield from [SendActivation(rank, m)] if rank < ranks - 1 else []
            for m in range(microbatches):
                yield from [ReceiveGradient(rank, m)] if rank < ranks - 1 else []
                yield Backward(rank, m)
                yield from [SendGradient(rank, m)] if rank else []
            yield Reduce(rank)
        return [tuple(program(rank)) for rank in range(ranks)]

The program of a single stage runs forward and backward of each microbatch in turn, then the reduction; gradient
accumulation is the same program with more microbatches. The optimizer step is not an action: it follows after all
programs have ended, because clipping needs the gradients of every stage.

An action is printed as a letter, its stage and its microbatch: ``F2.5``. A send carries the producing stage's index, a
receive the consuming stage's: ``S>2.5`` on one rank is ``R>3.5`` on another, and ``S<3.5`` is ``R<2.5``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

__all__ = [
    "Action", "Backward", "Forward", "InputBackward", "MicrobatchAction", "Overlap", "Program", "ReceiveActivation",
    "ReceiveGradient", "Reduce", "Schedule", "SendActivation", "SendGradient", "WeightBackward", "compute_parts",
    "count_stages", "forward_only", "single_stage",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Action:
    """Base of all actions.

    Attributes:
        stage: index of a stage on the rank that runs the action.
    """

    stage: int


@dataclass(frozen=True, slots=True)
class MicrobatchAction(Action):
    """Base of the actions on one microbatch.

    Attributes:
        mark: printed letter of the action type.
    """

    mark: ClassVar[str]
    microbatch: int

    def __str__(self) -> str:
        return f"{self.mark}{self.stage}.{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Forward(MicrobatchAction):
    """Run a stage on one microbatch; on the last stage, compute the loss too."""

    mark = "F"


@dataclass(frozen=True, slots=True)
class Backward(MicrobatchAction):
    """Compute all gradients of one microbatch."""

    mark = "B"


@dataclass(frozen=True, slots=True)
class InputBackward(MicrobatchAction):
    """Compute the gradients of the stage's inputs; :class:`WeightBackward` computes the weight gradients later."""

    mark = "I"


@dataclass(frozen=True, slots=True)
class WeightBackward(MicrobatchAction):
    """Compute the weight gradients that :class:`InputBackward` left out."""

    mark = "W"


@dataclass(frozen=True, slots=True)
class SendActivation(MicrobatchAction):
    """Send the stage's outputs to the rank of the next stage."""

    mark = "S>"


@dataclass(frozen=True, slots=True)
class ReceiveActivation(MicrobatchAction):
    """Receive the stage's inputs from the rank of the previous stage."""

    mark = "R>"


@dataclass(frozen=True, slots=True)
class SendGradient(MicrobatchAction):
    """Send the gradients of the stage's inputs to the rank of the previous stage."""

    mark = "S<"


@dataclass(frozen=True, slots=True)
class ReceiveGradient(MicrobatchAction):
    """Receive the gradients of the stage's outputs from the rank of the next stage."""

    mark = "R<"


@dataclass(frozen=True, slots=True)
class Overlap(Action):
    """Run a forward and a backward of different microbatches or stages at the same time."""

    stage: int = field(init=False, repr=False)
    forward: Forward
    backward: Backward | InputBackward

    def __post_init__(self) -> None:
        object.__setattr__(self, "stage", self.forward.stage)

    def __str__(self) -> str:
        return f"{self.forward}+{self.backward}"


@dataclass(frozen=True, slots=True)
class Reduce(Action):
    """Start the reduction of a stage's gradients over other ranks, once all its gradients are computed."""

    def __str__(self) -> str:
        return f"R{self.stage}"


#: Actions of one rank, in order.
Program = tuple[Action, ...]


class Schedule(Protocol):
    """Generator of programs: a pure function, so that programs can be printed, checked and simulated without a GPU."""

    def __call__(self, ranks: int, microbatches: int, /) -> Sequence[Program]:
        """Programs of all pipeline ranks. The schedule chooses the number of stages and their ranks.

        Raises:
            ValueError: the schedule does not support these numbers of ranks and microbatches; the message says which
                numbers it supports.
        """
        ...


def single_stage(stages: int, microbatches: int) -> Sequence[Program]:
    """Program of a model with a single stage: forward and backward of each microbatch in turn, then the reduction.

    Raises:
        ValueError: there are several stages.
    """
    if stages != 1:
        raise ValueError(f"the single-stage program runs one stage, not {stages}; choose a pipeline schedule")
    steps = [action for index in range(microbatches) for action in (Forward(0, index), Backward(0, index))]
    return [(*steps, Reduce(0))]


def compute_parts(action: Action) -> tuple[Action, ...]:
    """Split an overlapped pair into its forward and backward; for another action, return a tuple with the action."""
    return (action.forward, action.backward) if isinstance(action, Overlap) else (action,)


def count_stages(programs: Sequence[Program]) -> int:
    """Number of stages of the programs: the highest index plus one."""
    return 1 + max((action.stage for program in programs for action in program), default=-1)


def forward_only(program: Program) -> Program:
    """Forwards, and sends and receives of activations, of a program in the same order, for evaluation."""
    kept: list[Action] = []
    for action in program:
        kept += [part for part in compute_parts(action) if isinstance(part, _OF_FORWARD)]
    return tuple(kept)


_OF_FORWARD = (Forward, SendActivation, ReceiveActivation)
