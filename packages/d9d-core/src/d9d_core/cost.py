"""Cost descriptions of models, strategies, optimizers and schedules, from which layouts are planned. Imports no torch.

A model describes the blocks of a pipeline stage, each as a list of ops: FLOPs, bytes that move between the device's
memory and its processors, and bytes that the backward needs. All numbers are those of one rank and one microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from math import prod
from typing import Literal, Protocol

from d9d_core.schedule import Program

__all__ = [
    "AdapterCost", "AttentionShape", "BlockCost", "ContextCost", "Exchange", "ModelCosts", "OpCost", "OptimizerCost",
    "Share", "StageCost", "StageTimes", "StrategyCost", "Weight",
]  # fmt: skip

#: Which rate of a device bounds an op beside that of its memory: dense products, grouped ones, attention, or none.
OpKind = Literal["product", "grouped_product", "attention", "memory"]
#: Collectives, and the transfer between two ranks.
Operation = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"]


@dataclass(frozen=True, slots=True)
class Share:
    """Share of one rank in the work on one microbatch, whose cost is described.

    Attributes:
        samples: samples of the microbatch.
        length: positions of a whole sample.
        tensor, context, experts: sizes of the axes ``tp``, ``cp`` and ``ep``.
        width: bytes of a number of the activations.
        compiled: blocks are compiled, so that elementwise ops are fused.
        memory: bytes of the device, for ops that keep more where there is more.
    """

    samples: int
    length: int
    tensor: int = 1
    context: int = 1
    experts: int = 1
    width: int = 2
    compiled: bool = False
    memory: float = 80 * 2**30

    @property
    def tokens(self) -> float:
        """Positions of the microbatch that this rank sees, those that it shares with other ranks of ``tp`` included."""
        return self.samples * self.length / self.context


#: Kinds of parameters, of which fine-tuning methods choose: matrices of linear layers, tables of words, projections to
#: words, stacks of one matrix for each expert, and all others.
WeightKind = Literal["linear", "embedding", "head", "bank", "other"]


@dataclass(frozen=True, slots=True)
class Weight:
    """Weight in a description of costs: a parameter that an op computes with.

    Attributes:
        name: qualified name within its block, such as ``attention.q_proj.weight``; outside of blocks, within the model.
        shape: on one rank of ``tp`` and ``ep``; of a matrix, features out and in, as torch has them.
        kind: what it is.
        cut: dimension that ``tp`` splits, if it does.
        trains: whether it does; a fine-tuning method freezes it otherwise.
    """

    name: str
    shape: tuple[int, ...]
    kind: WeightKind = "other"
    cut: int | None = None
    trains: bool = True

    @property
    def numbers(self) -> int:
        """Number of its parameters on one rank, before data parallelism shards them."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Shape of an attention on one rank, from which a strategy tells what ranks of ``cp`` exchange.

    Attributes:
        rows: queries of own positions, which are as many as the own keys.
        query_heads, key_value_heads: heads of this rank.
        features: features of a head.
        width: bytes of a number.
    """

    rows: float
    query_heads: float
    key_value_heads: float
    features: int
    width: int


@dataclass(frozen=True, slots=True)
class OpCost:
    """Cost of an op.

    Attributes:
        name: of the op, for tables.
        kind: what it is bound by.
        flops, backward_flops: operations of forward and backward; a multiply and an add are two.
        traffic, backward_traffic: bytes read and written.
        kept: bytes kept from the forward for the backward.
        rows: rows that its weights are applied to.
        weights: its parameters, for optimizers and fine-tuning methods whose costs depend on them.
        workspace: the part of the workspace of its block that only gradients of its weights need.
        kept_for_weights: the part of ``kept`` that only gradients of its weights need, if that is not all or nothing.
        attention: shape of an attention across positions; ``None`` of other ops.
    """

    name: str
    kind: OpKind
    flops: float = 0.0
    backward_flops: float = 0.0
    traffic: float = 0.0
    backward_traffic: float = 0.0
    kept: float = 0.0
    rows: float = 0.0
    weights: tuple[Weight, ...] = ()
    workspace: float = 0.0
    kept_for_weights: float = 0.0
    attention: AttentionShape | None = None

    @property
    def attended(self) -> float:
        """Bytes of what an attention returns, and of the float32 sums of its softmax; 0 of other ops."""
        shape = self.attention
        return 0.0 if shape is None else shape.rows * shape.query_heads * (shape.width * shape.features + 4)


@dataclass(frozen=True, slots=True)
class Exchange:
    """Exchange in the cost of a block: a collective along one mesh axis.

    Attributes:
        operation: which one.
        axis: mesh axis of its ranks.
        size: bytes: of the gathered tensor, of the one before a reduce-scatter or all-reduce, or of all that one rank
            sends.
        ranks: ranks of the collective, if it is not among all of the axis.
        stride: distance of neighbours among them along the axis.
        count: how often it is made.
    """

    operation: Operation
    axis: str
    size: float
    ranks: int | None = None
    stride: int = 1
    count: int = 1


@dataclass(frozen=True, slots=True)
class BlockCost:
    """Cost of a block, or of several blocks that are alike.

    Attributes:
        name: for tables.
        ops: its ops.
        parameters: parameters on this rank before data parallelism shards them.
        expert_parameters: further ones, of experts, which the view ``expert`` of the mesh spreads.
        input: bytes of its input, which is all that activation checkpointing keeps.
        workspace: further bytes at the peak of its backward.
        exchanges, backward_exchanges: collectives of forward and backward, for which computation waits unless a
            strategy overlaps them (:attr:`StrategyCost.overlaps`).
        beside, backward_beside: those that travel while attention is computed.
        count: number of such blocks in the stage.
        is_block: it is a block of the trait ``model:blocks``, which strategies recompute, compile and shard one by one;
            embeddings and heads are not.
        names: qualified names of the blocks, as many as ``count``, which those of their weights follow; none where
            the weights have whole names.
        frozen, frozen_experts: numbers of ``parameters`` and ``expert_parameters`` that do not train.
    """

    name: str
    ops: tuple[OpCost, ...]
    parameters: int = 0
    expert_parameters: int = 0
    input: float = 0.0
    workspace: float = 0.0
    exchanges: tuple[Exchange, ...] = ()
    backward_exchanges: tuple[Exchange, ...] = ()
    count: int = 1
    is_block: bool = True
    names: tuple[str, ...] = ()
    frozen: int = 0
    frozen_experts: int = 0
    beside: tuple[Exchange, ...] = ()
    backward_beside: tuple[Exchange, ...] = ()

    @property
    def has_backward(self) -> bool:
        """Whether gradients pass through the block at all."""
        return any(op.backward_flops or op.backward_traffic for op in self.ops)

    @property
    def kept(self) -> float:
        """Bytes that the ops of one of the blocks keep for the backward."""
        return sum(op.kept for op in self.ops)

    @property
    def attended(self) -> float:
        """Bytes of :attr:`OpCost.attended` of one of the blocks."""
        return sum(op.attended for op in self.ops)


@dataclass(frozen=True, slots=True)
class StageCost:
    """Cost of a pipeline stage.

    Attributes:
        blocks: in the order of the forward.
        boundary: bytes of what it sends to the next stage for a microbatch; 0 for the last.
    """

    blocks: tuple[BlockCost, ...]
    boundary: float = 0.0


@dataclass(frozen=True, slots=True)
class ContextCost:
    """Cost of an attention whose positions ranks of ``cp`` share.

    Attributes:
        ops: in the place of the attention alone.
        exchanges, backward_exchanges, beside, backward_beside: see :class:`BlockCost`.
        workspace: further bytes at the peak of the backward of its block.
    """

    ops: tuple[OpCost, ...]
    exchanges: tuple[Exchange, ...] = ()
    backward_exchanges: tuple[Exchange, ...] = ()
    beside: tuple[Exchange, ...] = ()
    backward_beside: tuple[Exchange, ...] = ()
    workspace: float = 0.0


@dataclass(frozen=True, slots=True)
class StrategyCost:
    """Effect of a strategy on the cost of a job.

    Attributes:
        shards: parameters, gradients and optimizer state are sharded over the data-parallel view of the mesh.
        gathers: whole parameters in the format of computation exist beside those that the optimizer updates: never,
            from the forward of their block to its backward, or for both of them anew.
        reduces: when gradients are reduced over data-parallel ranks: beside the backward of each microbatch; of each
            one to shards, and of the last one over replicas; or beside that of the last one, whole up to then.
        in_place: where neither ``dp_shard`` nor ``cp`` nor ``pp`` has several ranks, nothing is gathered or copied;
            gradients are reduced where they are, beside the backward of the last microbatch.
        compute_width, reduce_width: bytes of a number of parameters in computation, and of gradients in reductions.
        offloads: parameters, gradients and optimizer state are in the host's memory.
        compiled: blocks are compiled.
        recomputed: part of the blocks that the backward computes again.
        keeps_attention: what attention returns is kept in these.
        context: cost of an attention on so many ranks of ``cp``; it raises ``BuildError`` where they cannot share the
            heads. Functions that do the same should be equal, so that plans compute each once.
        overlaps: axes whose exchanges in blocks travel part by part beside the products of their block.
    """

    shards: bool = False
    gathers: Literal["never", "once", "twice"] = "never"
    reduces: Literal["never", "each", "replicas_last", "last"] = "never"
    in_place: bool = False
    compute_width: int | None = None
    reduce_width: int | None = None
    offloads: bool = False
    compiled: bool = False
    recomputed: float = 0.0
    keeps_attention: bool = False
    context: Callable[[OpCost, int], ContextCost] | None = None
    overlaps: frozenset[str] = frozenset()

    def __or__(self, other: StrategyCost) -> StrategyCost:
        """Effect of both: what the other one leaves as it is by default stays as here."""
        default = StrategyCost()
        changed = {f.name: getattr(other, f.name) for f in fields(other)}
        return replace(self, **{name: value for name, value in changed.items() if value != getattr(default, name)})


@dataclass(frozen=True, slots=True)
class AdapterCost:
    """Cost of what a fine-tuning method does with one weight, for one microbatch; all else of the model is frozen.

    Attributes:
        trains: the weight itself trains.
        parameters: parameters that the method adds, on this rank as the weight; they train.
        flops, backward_flops: operations of the products that it adds.
        traffic, backward_traffic: bytes that it reads and writes besides.
        kept: bytes that it keeps for the backward besides.
    """

    trains: bool = False
    parameters: int = 0
    flops: float = 0.0
    backward_flops: float = 0.0
    traffic: float = 0.0
    backward_traffic: float = 0.0
    kept: float = 0.0

    def __add__(self, other: AdapterCost) -> AdapterCost:
        """Cost of two methods on the same weight."""
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self) if f.name != "trains"}
        return AdapterCost(trains=self.trains or other.trains, **sums)


#: Cost by a weight's whole name, the weight, the rows of its op, and the share: :attr:`d9d_core.plugin.PeftSpec.cost`
#: of one config.
AdapterCosts = Callable[[str, Weight, float, Share], AdapterCost]


@dataclass(frozen=True, slots=True)
class OptimizerCost:
    """Cost of an optimizer for each parameter.

    Attributes:
        state: bytes of its state.
        traffic: bytes that an update reads and writes, gradient and parameter included.
        workspace: bytes that exist during an update, of all parameters at once.
        workspace_of_one: bytes that exist while the largest weight is updated, for each of its parameters.
        flops: operations of products in bfloat16.
        exchanged: bytes that go to the one rank that updates a whole matrix, and come back, where ranks share it.
        of_weight: cost for each parameter of a weight by its whole name and the shape of all of it, which then counts
            in place of this one; ``None`` if all cost the same.
    """

    state: float
    traffic: float
    workspace: float = 0.0
    workspace_of_one: float = 0.0
    flops: float = 0.0
    exchanged: float = 0.0
    of_weight: Callable[[str, tuple[int, ...]], OptimizerCost] | None = None


class ModelCosts(Protocol):
    """Protocol of :attr:`d9d_core.plugin.ModelSpec.cost`."""

    def __call__(self, config: object, stage: object, share: Share) -> StageCost:
        """Cost of a :class:`~d9d_core.model.Stage` of the model.

        Raises:
            BuildError: the share cannot be, such as of heads that ``tp`` does not divide.
        """
        ...


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Times of the stages of a pipeline for one microbatch, in seconds.

    Attributes:
        forward, backward: stage -> time; the backward is a whole one.
        weight: stage -> the part of the backward that weight gradients take.
        transfer: time of one tensor from one rank to another.
    """

    forward: Sequence[float]
    backward: Sequence[float]
    weight: Sequence[float]
    transfer: float = 0.0


#: Signature of :attr:`d9d_core.plugin.ScheduleSpec.simulate`: seconds of a step of the programs of all ranks.
Simulate = Callable[[Sequence[Program], StageTimes], float]
