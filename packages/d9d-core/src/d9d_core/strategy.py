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

A strategy that shards or replicates parameters lists the :class:`GradientOwner` of each reduction that it takes over.
Optional: :class:`Meetings`, of a strategy whose replicas take their own optimizer steps, and
:class:`d9d_core.elastic.ElasticReplicas`, of a strategy whose replicas may come and go.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from d9d_core.elastic import ElasticReplicas
    from d9d_core.topology import Topology

__all__ = [
    "Applied", "Collective", "CommunicatesAlone", "CommunicatesInContext", "Communication", "ContextCall",
    "GradientOwner", "Kind", "Meetings", "Pass", "Reducer", "StepShape", "Strategy", "is_inside", "matched_modules",
    "no_collectives", "unmatched_patterns",
]  # fmt: skip

Kind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send", "receive"]
"""Kind of a collective, or of one side of a point-to-point transfer."""
Pass = Literal["forward", "backward", "input_backward"]
"""Pass of a microbatch through a stage; an ``input_backward`` defers the weight gradients."""


@dataclass(frozen=True, slots=True)
class Collective:
    """Calls of one collective in a step, declared by a strategy for ``d9d explain``: operation, ranks and size.

    ``bytes`` counts one rank's call: the result of an all-gather, the input of a reduce-scatter, all-to-all or
    all-reduce, the tensor of a send or a receive. Calls over a single rank communicate nothing and are left out.

    Attributes:
        kind: operation.
        group: name, for output, of the mesh dimensions that the ranks of the collective span, such as ``fsdp``.
        ranks: all ranks of the collective, in order; for a send or a receive, this rank and the peer.
        bytes: bytes of one call; ``None`` if they depend on the data.
        count: number of calls in a step.
        purpose: description of the data, such as ``parameters of layers.0``.
        module: qualified name of the module whose forward makes the calls, so that calls of a checkpointed block are
            counted again for its recomputation; ``None`` if no recomputation repeats them.
        approximate: whether ``bytes`` is an estimate, because it depends on values such as the choices of a router.
        at_most: whether ``count`` is an upper bound: the recomputation of a checkpointed block stops at the last tensor
            that the backward needs.
        every: number of steps per ``count`` calls; above 1 for calls that only some steps make.
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
    every: int = 1


@dataclass(frozen=True, slots=True)
class StepShape:
    """Shape of a step on one rank and stage, from which a strategy derives its collectives.

    Attributes:
        passes: the rank's forwards and backwards on this stage, in order.
        samples: number of rows in a microbatch; each text of a sample is a row.
        positions: positions of a sample on a rank of ``cp``, before ``tp`` splits them; ``None`` if they depend on the
            data.
        itemsize: bytes per element in the forward.
        approximate: whether sizes of activations are estimates, because autocast chooses dtypes, or because
            microbatches differ in length and ``positions`` is the maximum.
    """

    passes: tuple[Pass, ...]
    samples: int
    positions: int | None
    itemsize: int
    approximate: bool = False

    @property
    def forwards(self) -> int:
        """Number of forwards in the step, one per microbatch."""
        return self.passes.count("forward")

    @property
    def backwards(self) -> int:
        """Number of backwards in the step: full and input backwards, without weight backwards."""
        return len(self.passes) - self.forwards

    @property
    def split_backward(self) -> bool:
        """Whether weight gradients are computed after input gradients, so that reductions must wait until the end."""
        return "input_backward" in self.passes

    def bytes_of(self, numbers: float, itemsize: int | None = None) -> int | None:
        """Bytes of a tensor with ``numbers`` elements per position of a microbatch; ``None`` if positions are unknown.

        Args:
            numbers: elements per position.
            itemsize: bytes per element; by default, as in the forward.
        """
        if self.positions is None:
            return None
        return round(self.samples * self.positions * numbers * (self.itemsize if itemsize is None else itemsize))


class Communication(Protocol):
    """Declaration of a strategy's collectives in a step, for :attr:`d9d_core.strategy.Applied.collectives`."""

    def __call__(self, step: StepShape, /) -> Iterable[Collective]:
        """List this rank's collectives for one stage in a step. Called after all strategies were applied."""
        ...


def no_collectives(step: StepShape, /) -> Sequence[Collective]:  # noqa: ARG001 - the signature of Communication
    """Empty list of collectives: the :attr:`Applied.collectives` of a strategy that communicates nothing."""
    return ()


@runtime_checkable
class CommunicatesAlone(Protocol):
    """Protocol of a module that communicates by itself over a group that a strategy gave it.

    An example is an output head whose vocabulary is split over the group.
    """

    def forward_collectives(self, step: StepShape) -> Iterable[tuple[Kind, int | None]]:
        """Operation and bytes of each collective in one forward on a microbatch; the backward must have none."""
        ...


@dataclass(frozen=True, slots=True)
class ContextCall:
    """Collective over ``cp`` in each pass of a microbatch through a module.

    Attributes:
        kind: operation.
        bytes: bytes of the call, as in :class:`Collective`; ``None`` if they depend on the data.
        what: description of the data.
        backward: whether the call belongs to the backward instead of the forward.
        at_most: whether some microbatches may skip the call.
    """

    kind: Kind
    bytes: int | None
    what: str
    backward: bool = False
    at_most: bool = False


@runtime_checkable
class CommunicatesInContext(Protocol):
    """Protocol of a :class:`~d9d_core.model.SeesContext` that lists its collectives over ``cp``."""

    def context_collectives(self, step: StepShape) -> Iterable[ContextCall]:
        """Collectives of a microbatch; callers call :meth:`~d9d_core.model.SeesContext.see_context` first."""
        ...


@dataclass(frozen=True, slots=True)
class GradientOwner:
    """Owner of the reduction of one parameter's gradient over one mesh axis, and the reduction's operation.

    For a parameter that belongs to a view (:attr:`Applied.views`), ``axis`` is a dimension of the view.

    Owner ``fsdp``: FSDP reduces the gradient. Owner ``sync``: the engine reduces the gradient. Owner ``none``: the
    gradient is not reduced over the axis. If ranks of the axis see different samples and hold the same part of a
    parameter with owner ``none``, its replicas diverge, and the strategy must set :attr:`Applied.meetings` or
    :attr:`Applied.resynchronise`. The replicas of all trained parameters must then diverge over the same axes: a
    replica's loss is the mean over its own samples, and so are all its gradients.
    """

    parameter: str
    axis: str
    owner: Literal["fsdp", "sync", "none"]
    operation: Literal["sum", "max"] = "sum"


class Reducer(Protocol):
    """Reducer of a strategy: reduces gradients over ranks during a backward, and is notified before each backward."""

    def before_backward(self, last: bool, complete: bool = True) -> None:
        """Prepare for the next backward of the stage.

        Args:
            last: whether this is the last backward of the step; when it ends, reductions of all gradients have started.
            complete: whether the backward computes all gradients of its microbatch. If false, weight gradients follow
                later, so nothing may be reduced before :meth:`reduce`, and ``last`` is false.
        """
        ...

    def after_weights(self) -> None:
        """Called after a microbatch's deferred weight gradients were added to the gradients of earlier microbatches."""
        ...

    def reduce(self) -> None:
        """Reduce the remaining gradients, all of which exist. Called only if a backward was not ``complete``."""
        ...


class Meetings(Protocol):
    """Meetings: steps after which replicas with their own optimizer steps get equal parameters, as in local SGD.

    Between two meetings, each replica trains with the gradients, gradient norm and optimizer state of its own samples.
    If a step is not finite in one replica, no replica takes it. At a meeting, the parameters of all replicas become
    equal; optimizer states stay different. A checkpoint keeps the optimizer state of every replica and, unless they are
    equal after a meeting, the parameters of every replica, so a run may be saved and stopped after any step.
    Evaluations and exports between two meetings use the mean of the replicas' parameters, and do not change the
    training.
    """

    def start(self) -> None:
        """Take the current values of the parameters as common values of all replicas, and create :meth:`state`.

        Called after the parameters have their initial values, and again if a checkpoint without the state was loaded.
        """
        ...

    def due(self, steps: int) -> bool:
        """Whether the replicas meet after ``steps`` steps (1 or more): a pure function, equal on all ranks."""
        ...

    def meet(self) -> None:
        """Make the parameters of all replicas equal, in place. Collective over the axes of the replicas.

        Called after the optimizer's step, also if this step was not finite and changed nothing.
        """
        ...

    def state(self) -> Mapping[str, Tensor]:
        """Tensors that checkpoints save: ``"<parameter name>/<slot>"`` -> tensor, not copied.

        Equal in all replicas, and sharded like the parameter; a load writes into these tensors.
        """
        ...


@dataclass(frozen=True, slots=True)
class Applied:
    """Result of applying a strategy. A strategy that changed no module is an error: every setting must have an effect.

    Attributes:
        modules: qualified names of the changed modules; the stage itself is ``""``.
        gradients: reductions that the strategy takes over.
        views: parameter -> view of the mesh over which it is sharded, if not over base axes.
        reducers: objects to notify before each backward.
        compute_dtype: dtype to which the strategy converts parameters and inputs for the forward; ``None`` if it does
            not.
        on_host: names of the parameters in host memory, on any device.
        unmatched: settings that this stage has no match for, such as a pattern of parameter names -> error text, raised
            if no other stage has a match either.
        sequence_ranks: number of ranks over which positions of hidden states are split, also at stage boundaries; if
            above 1, the model is a :class:`~d9d_core.model.SplitsSequence`.
        cuda_graphs: whether the modules' forward and backward are recorded as CUDA graphs, whose outputs live until the
            next step begins; a job whose layout needs them longer is refused.
        outside_graph: qualified names of the modules whose ops run outside compiled graphs even if the code around them
            is compiled: they use kernels for uncompiled code.
        notes: lines for ``d9d explain``, for example about parts left unchanged, and why.
        collectives: function that lists the strategy's collectives in a step, for ``d9d explain``;
            :func:`~no_collectives` if there are none; ``None`` if unknown, which ``explain`` reports.
        resynchronise: function that makes all replicas of parameters and optimizer state equal, required of a strategy
            that lets them diverge between steps, such as local SGD. Collective over all ranks; called before each save,
            evaluation and export, which use only one replica.
        check_kernels: function called when kernels are bound to the stage's ops, after all strategies; raises
            :class:`~d9d_core.errors.BuildError` if the kernels do not support the strategy.
        meetings: object that makes replicas equal after some steps; instead of ``resynchronise``, if replicas take
            their own steps and a save, an evaluation or an export must not change the training.
        elastic: replicas of the whole run, outside of this job's mesh, that share the microbatches of each step.
        storing: qualified names of the checkpointed modules that store outputs of torch operators, which patterns such
            as ``aten.mm`` name; kernels that hide products from torch are not chosen there.
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
    meetings: Meetings | None = None
    elastic: ElasticReplicas | None = None
    storing: tuple[str, ...] = ()


class Strategy(Protocol):
    """Parallel strategy: changes a built stage in place; names of parameters do not change."""

    def apply(self, stage: nn.Module, topology: Topology) -> Applied:
        """Change the stage, which is on the meta device. Collective over all ranks if it requests a device mesh.

        Raises:
            BuildError: the stage lacks a trait or module that the strategy needs.
        """
        ...


def matched_modules(stage: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    """Outermost modules of a stage whose names match a pattern of :attr:`d9d_core.config.PartConfig.match`.

    Args:
        stage: stage of the model.
        patterns: patterns of qualified names, in which ``*`` also matches dots; empty matches the stage itself, ``""``.

    Returns:
        Qualified name -> module, in order of registration. A module inside another matched module is left out.
    """
    if not patterns:
        return {"": stage}
    found: dict[str, nn.Module] = {}
    for name, module in stage.named_modules():
        if name and not is_inside(name, found) and any(fnmatchcase(name, pattern) for pattern in patterns):
            found[name] = module
    return found


def is_inside(name: str, modules: Collection[str]) -> bool:
    """Whether a qualified name names one of some modules, or a module or parameter inside one; ``""`` is the stage."""
    return any(not module or name == module or name.startswith(f"{module}.") for module in modules)


def unmatched_patterns(stage: nn.Module, patterns: Iterable[str], strategy: str) -> dict[str, str]:
    """Errors for patterns of modules that match no module of a stage, for :attr:`Applied.unmatched`.

    Args:
        stage: stage of the model.
        patterns: patterns of qualified names of modules.
        strategy: name of the strategy, for the error texts.
    """
    names = [name for name, _ in stage.named_modules() if name]
    return {
        f"match {pattern}": f"strategy '{strategy}': the pattern {pattern!r} in 'match' matches no module; modules "
        f"with similar names: {', '.join(get_close_matches(pattern, names, 3, 0.0))}"
        for pattern in patterns
        if not any(fnmatchcase(name, pattern) for name in names)
    }
