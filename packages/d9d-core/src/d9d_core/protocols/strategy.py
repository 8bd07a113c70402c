"""Parallel strategies: changes to a stage in place, and owners of the gradients' reductions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    import torch
    from torch import nn

    from d9d_core.program.collectives import Communication
    from d9d_core.protocols.topology import Topology


@dataclass(frozen=True, slots=True)
class GradientOwner:
    """Owner of the reduction of one parameter's gradient over one mesh axis, and its operation.

    A parameter that belongs to a view (:attr:`Applied.views`) has that view's dimensions in place of the axes.
    """

    parameter: str
    axis: str
    owner: Literal["fsdp", "sync", "none"]
    operation: Literal["sum", "max"] = "sum"


class Reducer(Protocol):
    """Reducer of gradients over ranks while a backward runs; it is told which backward is coming."""

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
            is a :class:`~d9d_core.protocols.model.SplitsSequence`.
        cuda_graphs: the modules' forward and backward are recorded as CUDA graphs, whose outputs live until the next
            step begins; a job whose layout breaks that is refused.
        notes: lines for ``d9d explain``, such as what was left as it is, and why.
        collectives: tells what the strategy communicates in a step, for ``d9d explain``;
            :func:`~d9d_core.program.collectives.no_collectives` if nothing. ``None``: it does not tell, and ``explain``
            says so.
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
    notes: tuple[str, ...] = ()
    collectives: Communication | None = None


class Strategy(Protocol):
    """Parallel strategy: changes a built stage in place; parameter names stay what they were."""

    def apply(self, stage: nn.Module, topology: Topology) -> Applied:
        """Apply to the stage, on the meta device. Collective over all ranks if it takes a mesh from the topology.

        Raises:
            BuildError: the stage lacks what the strategy needs.
        """
        ...
