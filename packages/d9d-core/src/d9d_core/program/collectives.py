"""Collectives of a training step as data, so that ``d9d explain`` lists them without processes. Imports no torch.

Bytes are those of one rank's call: of what an all-gather returns, of what a reduce-scatter or an all-to-all takes, of
what an all-reduce reduces and of what a send or a receive carries. A call among one rank sends nothing and is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from d9d_core.program.actions import Backward, Forward, InputBackward, Program

Kind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send", "receive"]


@dataclass(frozen=True, slots=True)
class Collective:
    """Calls of one collective in a step: same operation, same ranks, same size.

    Attributes:
        kind: operation.
        group: mesh dimensions that its ranks lie along, for people, such as ``fsdp``.
        ranks: numbers of all of its ranks, in order; of a send or a receive, this rank's and the other's.
        bytes: bytes of one call; ``None`` where only the data tells.
        count: number of calls in a step.
        purpose: what travels, in words, such as ``parameters of layers.0``.
        module: qualified name of the module whose forward makes the calls, so that those of a checkpointed block are
            counted again for its second forward; ``None`` if no second forward repeats them.
        approximate: ``bytes`` follow from values that a step has and a plan lacks, such as the choices of a router.
        at_most: ``count`` is the most that there can be, as in the second forward of a checkpointed block, which ends
            with the last tensor that the backward needs.
    """

    kind: Kind
    group: str
    ranks: tuple[int, ...]
    bytes: int | None
    count: int
    purpose: str
    module: str | None = None
    approximate: bool = False
    at_most: bool = False


@dataclass(frozen=True, slots=True)
class StepShape:
    """Shape of a step on one rank and stage, from which a strategy tells what it communicates.

    Attributes:
        actions: the rank's actions on this stage, in order.
        samples: number of rows in a microbatch, one for each text of a sample.
        positions: positions of a sample on a rank of ``cp``, those of all ranks of ``tp`` together; ``None`` where only
            the data tells.
        itemsize: bytes of a number in the forward.
        approximate: sizes of activations are guesses: autocast chooses formats, or microbatches differ in length and
            ``positions`` are the most.
    """

    actions: Program
    samples: int
    positions: int | None
    itemsize: int
    approximate: bool = False

    @property
    def forwards(self) -> int:
        """Number of forwards in the step, one for each microbatch."""
        return sum(isinstance(action, Forward) for action in self.actions)

    @property
    def backwards(self) -> int:
        """Number of backwards in the step; those of inputs alone count, those of weights do not."""
        return sum(isinstance(action, Backward | InputBackward) for action in self.actions)

    @property
    def split_backward(self) -> bool:
        """Whether weight gradients come later than those of inputs, so that nothing can be reduced before the end."""
        return any(isinstance(action, InputBackward) for action in self.actions)

    def bytes_of(self, numbers: float, itemsize: int | None = None) -> int | None:
        """Bytes of a tensor with so many numbers for each position of a microbatch; ``None`` if those are not known.

        Args:
            numbers: of one position.
            itemsize: bytes of a number; those of the forward by default.
        """
        if self.positions is None:
            return None
        return round(self.samples * self.positions * numbers * (self.itemsize if itemsize is None else itemsize))


class Communication(Protocol):
    """Declaration of what a strategy communicates in a step, for :attr:`d9d_core.extend.Applied.collectives`."""

    def __call__(self, step: StepShape, /) -> Iterable[Collective]:
        """List the calls of this rank on one stage. Asked once all strategies were applied; communicates nothing."""
        ...


def no_collectives(step: StepShape, /) -> Sequence[Collective]:  # noqa: ARG001 - the signature of Communication
    """Declaration of a strategy that communicates nothing."""
    return ()


@runtime_checkable
class CommunicatesAlone(Protocol):
    """Protocol of a module that communicates among ranks that a strategy gave it, such as a share of the vocabulary."""

    def forward_collectives(self, step: StepShape) -> Iterable[tuple[Kind, int | None]]:
        """Operation and bytes of each collective of one forward on a microbatch; backward there are none."""
        ...
