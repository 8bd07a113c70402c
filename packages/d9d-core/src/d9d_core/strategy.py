"""Parallel strategies: changes to a stage in place, owners of gradient reductions, and their collectives.

Start here: :class:`Strategy` changes a built stage and returns an :class:`Applied`, which names the changed modules::

    from d9d_core.strategy import Applied, no_collectives
    from d9d_core.traits import HasBlocks, modules_with

    class FreezeBlocks:
        def __init__(self, config): self.count = config.count

        def apply(self, stage, topology):
            (holder,) = modules_with(stage, HasBlocks).values()
            blocks = dict(list(holder.blocks().items())[: self.count])
            for block in blocks.values():
                block.requires_grad_(False)
            return Applied(modules=tuple(blocks), collectives=no_collectives)

A strategy that shards or replicates parameters names the :class:`GradientOwner` of each reduction it takes over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch
    from torch import nn

    from d9d_core.topology import Topology

__all__ = [
    "Applied", "Collective", "CommunicatesAlone", "CommunicatesInContext", "Communication", "ContextCall",
    "GradientOwner", "Kind", "Pass", "Reducer", "StepShape", "Strategy", "no_collectives",
]  # fmt: skip

Kind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send", "receive"]
"""Kind of a collective, or of one side of an exchange between two ranks."""
Pass = Literal["forward", "backward", "input_backward"]
"""Pass of a microbatch through a stage; an ``input_backward`` leaves the gradients of weights for later."""


@dataclass(frozen=True, slots=True)
class Collective:
    """Collective, as strategies tell theirs for ``d9d explain``: calls in a step of one operation, ranks and size.

    Bytes are those of one rank's call: of what an all-gather returns, of what a reduce-scatter or an all-to-all takes,
    of what an all-reduce reduces and of what a send or a receive carries. A call among one rank sends nothing and is
    left out.

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
        passes: the rank's forwards and backwards on this stage, in order.
        samples: number of rows in a microbatch, one for each text of a sample.
        positions: positions of a sample on a rank of ``cp``, those of all ranks of ``tp`` together; ``None`` where only
            the data tells.
        itemsize: bytes of a number in the forward.
        approximate: sizes of activations are guesses: autocast chooses formats, or microbatches differ in length and
            ``positions`` are the most.
    """

    passes: tuple[Pass, ...]
    samples: int
    positions: int | None
    itemsize: int
    approximate: bool = False

    @property
    def forwards(self) -> int:
        """Number of forwards in the step, one for each microbatch."""
        return self.passes.count("forward")

    @property
    def backwards(self) -> int:
        """Number of backwards in the step; those of inputs alone count, those of weights do not."""
        return len(self.passes) - self.forwards

    @property
    def split_backward(self) -> bool:
        """Whether weight gradients come later than those of inputs, so that nothing can be reduced before the end."""
        return "input_backward" in self.passes

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
    """Declaration of what a strategy communicates in a step, for :attr:`d9d_core.strategy.Applied.collectives`."""

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


@dataclass(frozen=True, slots=True)
class ContextCall:
    """Collective over ``cp`` in each pass of a microbatch through a module.

    Attributes:
        kind: operation.
        bytes: bytes of the call, as :class:`Collective` counts them; ``None`` where only the data tells.
        what: what travels, in words.
        backward: it belongs to each backward; otherwise to each forward.
        at_most: microbatches may do without it.
    """

    kind: Kind
    bytes: int | None
    what: str
    backward: bool = False
    at_most: bool = False


@runtime_checkable
class CommunicatesInContext(Protocol):
    """Protocol of a :class:`~d9d_core.model.SeesContext` that says what it communicates among ranks of ``cp``."""

    def context_collectives(self, step: StepShape) -> Iterable[ContextCall]:
        """Collectives of a microbatch, after :meth:`~d9d_core.model.SeesContext.see_context`."""
        ...


@dataclass(frozen=True, slots=True)
class GradientOwner:
    """Owner of the reduction of one parameter's gradient over one mesh axis, and its operation.

    A parameter that belongs to a view (:attr:`Applied.views`) has that view's dimensions in place of the axes. Owner
    ``none``: the gradient needs no reduction over the axis. Where ranks of the axis see different samples and hold the
    same part of the parameter, its replicas then drift apart, which takes :attr:`Applied.resynchronise`.
    """

    parameter: str
    axis: str
    owner: Literal["fsdp", "sync", "none"]
    operation: Literal["sum", "max"] = "sum"


class Reducer(Protocol):
    """Reducer of a strategy: reduces gradients over ranks while a backward runs; it is told which one is coming."""

    def before_backward(self, last: bool, complete: bool = True) -> None:
        """Prepare for a backward of the stage, which is about to start.

        Args:
            last: it is the last of the step; when it has ended, all gradients are reduced or being reduced.
            complete: it computes all gradients of its microbatch. If not, those of weights follow some time later, so
                nothing may be reduced before :meth:`reduce`, and ``last`` is false.
        """
        ...

    def after_weights(self) -> None:
        """Take note that deferred weight gradients of one microbatch were added to those of earlier ones."""
        ...

    def reduce(self) -> None:
        """Reduce what waits: all gradients are there. Only called if some backward of the step was not complete."""
        ...


@dataclass(frozen=True, slots=True)
class Applied:
    """Report of what a strategy did. One that changed no module is an error: nothing in a job file does nothing.

    Attributes:
        modules: qualified names of the modules it changed; the stage itself is ``""``.
        gradients: the reductions it takes responsibility for.
        views: parameter -> the view of the mesh that it is sharded over, if that is none of the base axes.
        reducers: what must know when a backward starts.
        compute_dtype: what it converts parameters and inputs to for the forward, if it does.
        on_host: names of the parameters that live in the host's memory, whatever the device.
        unmatched: what the config asks for and this stage lacks, such as a pattern that no parameter has, and the text
            of the error if no other stage has it either.
        sequence_ranks: ranks that positions of hidden states are split over, also where stages hand them on; the model
            is a :class:`~d9d_core.model.SplitsSequence`.
        cuda_graphs: the modules' forward and backward are recorded as CUDA graphs, whose outputs live until the next
            step begins; a job whose layout breaks that is refused.
        outside_graph: qualified names of the modules whose ops run outside of compiled graphs, whatever is compiled
            around them: their kernels are those of code that runs as written.
        notes: lines for ``d9d explain``, such as what was left as it is, and why.
        collectives: tells what the strategy communicates in a step, for ``d9d explain``;
            :func:`~no_collectives` if nothing. ``None``: it does not tell, and ``explain``
            says so.
        resynchronise: makes all replicas of parameters and of optimizer state equal again, of a strategy that lets them
            drift apart between steps, such as local SGD. Collective over all ranks; called before each save,
            evaluation and export, which hold one replica only. Without it such a strategy is refused.
        check_kernels: called when the stage's ops have their kernels, which come after strategies; raises a
            :class:`~d9d_core.errors.BuildError` if these cannot do what was asked of the strategy.
    """

    modules: tuple[str, ...]
    gradients: tuple[GradientOwner, ...] = ()
    views: Mapping[str, str] = field(default_factory=dict)
    reducers: tuple[Reducer, ...] = ()
    compute_dtype: torch.dtype | None = None
    on_host: frozenset[str] = frozenset()
    unmatched: Mapping[str, str] = field(default_factory=dict)
    sequence_ranks: int = 1
    cuda_graphs: bool = False
    outside_graph: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    collectives: Communication | None = None
    resynchronise: Callable[[], None] | None = None
    check_kernels: Callable[[], None] | None = None


class Strategy(Protocol):
    """Parallel strategy: changes a built stage in place; parameter names stay what they were."""

    def apply(self, stage: nn.Module, topology: Topology) -> Applied:
        """Apply to the stage, on the meta device. Collective over all ranks if it takes a mesh from the topology.

        Raises:
            BuildError: the stage lacks what the strategy needs.
        """
        ...
