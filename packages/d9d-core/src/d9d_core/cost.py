"""Costs of models, strategies, optimizers and schedules, from which layouts are planned. Imports no torch.

A model describes the blocks of a pipeline stage, each as a list of ops with FLOPs, bytes of memory traffic, and bytes
kept for the backward. All numbers hold for one rank and one microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import prod
from typing import Any, Literal, Protocol

from d9d_core.kernel import OpSignature
from d9d_core.schedule import Program

__all__ = [
    "AdapterCost", "AttentionShape", "BlockCost", "ContextCost", "Exchange", "ModelCosts", "OpCost", "OptimizerCost",
    "Share", "StageCost", "StageTimes", "StrategyCost", "Weight",
]  # fmt: skip

#: Limit of an op's speed in addition to memory bandwidth: a device's FLOP/s of dense or grouped matrix products, or of
#: attention; ``memory`` if memory bandwidth is the only limit.
OpKind = Literal["product", "grouped_product", "attention", "memory"]
#: Collectives, and the point-to-point transfer between two ranks.
Operation = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"]


@dataclass(frozen=True, slots=True)
class Share:
    """Share of one rank in the work on one microbatch; ops derive their costs from it.

    Attributes:
        samples: number of samples in the microbatch.
        length: number of positions in a whole sample, before ``cp`` splits it.
        tensor, context, experts: sizes of the axes ``tp``, ``cp`` and ``ep``.
        width: bytes per element of the activations.
        compiled: whether blocks are compiled, so that elementwise ops are fused.
        memory: bytes of device memory, for ops that keep more if there is more memory.
        kernels: function that returns the name of the backend that a job would use for an op, see :meth:`backend`.
    """

    samples: int
    length: int
    tensor: int = 1
    context: int = 1
    experts: int = 1
    width: int = 2
    compiled: bool = False
    memory: float = 80 * 2**30
    kernels: Callable[[OpSignature], str] | None = field(default=None, compare=False)

    def backend(self, op: str, static: Mapping[str, Any]) -> str:
        """Name of the backend that a job would use for an op; ``reference`` for the op's reference, or if unknown.

        Args:
            op: name of the op.
            static: static facts of its slot, see :attr:`d9d_core.kernel.OpSignature.static`.
        """
        if self.kernels is None:
            return "reference"
        dtype = {2: "bfloat16", 4: "float32"}.get(self.width, "float32")
        return self.kernels(OpSignature(op, "cuda", dtype, static, self.compiled))

    @property
    def tokens(self) -> float:
        """Positions of the microbatch on this rank, before ``tp`` splits them."""
        return self.samples * self.length / self.context


#: Kinds of parameters, by which fine-tuning methods select: matrices of linear layers, embedding tables, output
#: projections (``head``), stacks with one matrix per expert (``bank``), and all others.
WeightKind = Literal["linear", "embedding", "head", "bank", "other"]


@dataclass(frozen=True, slots=True)
class Weight:
    """Parameter that an op computes with.

    Attributes:
        name: qualified name within its block, such as ``attention.q_proj.weight``; outside of blocks, within the model.
        shape: shape on one rank of ``tp`` and ``ep``; a matrix has shape [out features, in features], as in torch.
        kind: kind of the parameter.
        cut: dimension that ``tp`` splits; ``None`` if there is none.
        trains: whether the weight is trained, not frozen by a fine-tuning method.
    """

    name: str
    shape: tuple[int, ...]
    kind: WeightKind = "other"
    cut: int | None = None
    trains: bool = True

    @property
    def numbers(self) -> int:
        """Number of elements on one rank, before data parallelism shards them."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Shape of an attention op on one rank; strategies derive the communication over ``cp`` from it.

    Attributes:
        rows: number of query positions of this rank, equal to its number of key positions.
        query_heads, key_value_heads: heads of this rank.
        features: features per head.
        width: bytes per element.
        latent: latent elements per position, from which keys and values are computed (multi-head latent attention); 0
            without latents.
        expanded: elements per position that a matrix product computes from the latents, on this rank.
    """

    rows: float
    query_heads: float
    key_value_heads: float
    features: int
    width: int
    latent: int = 0
    expanded: float = 0.0


@dataclass(frozen=True, slots=True)
class OpCost:
    """Cost of an op on one rank for one microbatch.

    Attributes:
        name: name of the op, for tables.
        kind: device rate that bounds the op: FLOP/s of (grouped) matrix products or attention, or memory bandwidth.
        flops, backward_flops: FLOPs of forward and backward; a multiply-add counts as two.
        traffic, backward_traffic: bytes read from and written to device memory.
        kept: bytes kept from the forward for the backward.
        rows: number of input rows (positions) that the op multiplies with its weights.
        weights: parameters of the op, for optimizers and fine-tuning methods whose costs depend on them.
        workspace: bytes of the block's workspace that are not needed if the op's weights are frozen.
        kept_for_weights: bytes of ``kept`` that are not needed if the op's weights are frozen.
        attention: shape of an attention across positions; ``None`` for other ops.
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
        """Bytes of an attention's output and its float32 softmax statistics; 0 for other ops."""
        shape = self.attention
        return 0.0 if shape is None else shape.rows * shape.query_heads * (shape.width * shape.features + 4)


@dataclass(frozen=True, slots=True)
class Exchange:
    """Communication in the cost of a block: a collective along one mesh axis.

    Attributes:
        operation: type of the collective.
        axis: mesh axis along which the ranks communicate.
        size: bytes of the output of an all-gather, of the input of a reduce-scatter or all-reduce, or of all data that
            one rank sends in an all-to-all or send.
        ranks: number of ranks of the collective, if it does not span the whole axis.
        stride: distance between neighbouring ranks of the collective along the axis.
        count: number of repetitions.
    """

    operation: Operation
    axis: str
    size: float
    ranks: int | None = None
    stride: int = 1
    count: int = 1


@dataclass(frozen=True, slots=True)
class BlockCost:
    """Cost of a block, or of several equal blocks.

    Attributes:
        name: name for tables.
        ops: ops of the block.
        parameters: number of parameters on this rank, before data parallelism shards them.
        expert_parameters: number of parameters of experts on this rank, in addition to ``parameters``. They are sharded
            over the view ``expert`` of the mesh.
        input: bytes of the block's input, which activation checkpointing keeps.
        workspace: further bytes at the peak of the block's backward.
        exchanges, backward_exchanges: collectives of forward and backward. Computation waits for them unless a strategy
            overlaps them (:attr:`StrategyCost.overlaps`).
        beside, backward_beside: collectives of forward and backward that overlap with the computation of attention.
        count: number of such blocks in the stage.
        is_block: whether this is a block of the trait ``model:blocks``, which strategies recompute, compile and shard
            one by one; embeddings and heads are not.
        names: qualified names of the ``count`` blocks, which prefix the names of their weights. Empty if the weights
            have qualified names already.
        frozen, frozen_experts: numbers of ``parameters`` and ``expert_parameters`` that are not trained.
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
        """Whether gradients pass through the block."""
        return any(op.backward_flops or op.backward_traffic for op in self.ops)

    @property
    def kept(self) -> float:
        """Bytes that the ops of one block keep for the backward."""
        return sum(op.kept for op in self.ops)

    @property
    def attended(self) -> float:
        """Sum of :attr:`OpCost.attended` over the ops of one block, in bytes."""
        return sum(op.attended for op in self.ops)


@dataclass(frozen=True, slots=True)
class StageCost:
    """Cost of a pipeline stage.

    Attributes:
        blocks: blocks in the order of the forward.
        boundary: bytes that the stage sends to the next stage for a microbatch; 0 for the last.
    """

    blocks: tuple[BlockCost, ...]
    boundary: float = 0.0


@dataclass(frozen=True, slots=True)
class ContextCost:
    """Cost of an attention op whose positions are split over ``cp``.

    Attributes:
        ops: ops that replace the attention op.
        exchanges, backward_exchanges: collectives of forward and backward that the computation waits for.
        beside, backward_beside: collectives of forward and backward that overlap with the computation of attention.
        workspace: further bytes at the peak of the block's backward.
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
        shards: whether parameters, gradients and optimizer state are sharded over the data-parallel view of the mesh.
        gathers: how often a block's full parameters are all-gathered in the compute dtype for a forward and a backward:
            ``never``; ``once``, if they are kept from forward to backward; or ``twice``.
        reduces: when gradients are reduced over data-parallel ranks. ``each``: during the backward of each microbatch.
            ``replicas_last``: reduce-scattered in each microbatch, all-reduced over replicas in the last one. ``last``:
            during the backward of the last microbatch; full gradients are kept until then.
        in_place: whether, if each of ``dp_shard``, ``cp`` and ``pp`` has one rank, nothing is gathered or copied and
            gradients are reduced in place, during the backward of the last microbatch.
        compute_width, reduce_width: bytes per element of parameters in computation, and of gradients in reductions;
            ``None`` if the strategy does not change the dtype.
        offloads: whether parameters, gradients and optimizer state are in host memory.
        compiled: whether blocks are compiled.
        recomputed: fraction of the blocks that the backward recomputes.
        keeps_attention: whether recomputed blocks keep the output of attention.
        context: function from an attention op and the size of ``cp`` to the op's cost; it raises ``BuildError`` if the
            ranks cannot split the heads. Functions with the same effect should be equal, so that plans evaluate each
            once.
        overlaps: axes whose collectives in blocks overlap, in chunks, with the matrix products of their block.
        meets_every: number of steps between two all-reduces, in float32, of the parameters over ``dp_replicate``, whose
            replicas take their own steps; 0 if gradients are reduced over ``dp_replicate`` instead.
        state: bytes per trained parameter of tensors that the strategy keeps, sharded like the parameter.
        copies: number of copies of the trained parameters, with equal dtype and sharding, that the strategy keeps.
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
    meets_every: int = 0
    state: float = 0.0
    copies: int = 0

    def __or__(self, other: StrategyCost) -> StrategyCost:
        """Combine two effects: non-default fields of ``other`` replace the fields of this effect."""
        default = StrategyCost()
        changed = {f.name: getattr(other, f.name) for f in fields(other)}
        return replace(self, **{name: value for name, value in changed.items() if value != getattr(default, name)})


@dataclass(frozen=True, slots=True)
class AdapterCost:
    """Cost that a fine-tuning method adds for one weight, for one microbatch. A weight that no method trains is frozen.

    Attributes:
        trains: whether the weight itself is trained.
        parameters: number of trainable parameters that the method adds on a rank.
        flops, backward_flops: FLOPs of the added matrix products.
        traffic, backward_traffic: further bytes read and written.
        kept: further bytes kept for the backward.
    """

    trains: bool = False
    parameters: int = 0
    flops: float = 0.0
    backward_flops: float = 0.0
    traffic: float = 0.0
    backward_traffic: float = 0.0
    kept: float = 0.0

    def __add__(self, other: AdapterCost) -> AdapterCost:
        """Total cost of two methods that act on the same weight."""
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self) if f.name != "trains"}
        return AdapterCost(trains=self.trains or other.trains, **sums)


#: Function that returns the cost that an adapter adds to one weight, from the weight's qualified name, the weight, the
#: number of rows of its op and the rank's share; made of :attr:`d9d_core.plugin.PeftSpec.cost` and a config.
AdapterCosts = Callable[[str, Weight, float, Share], AdapterCost]


@dataclass(frozen=True, slots=True)
class OptimizerCost:
    """Cost of an optimizer, per parameter.

    Attributes:
        state: bytes of optimizer state.
        traffic: bytes of memory that an update reads and writes, including gradient and parameter.
        workspace: bytes that exist during an update, for all parameters at once.
        workspace_of_one: bytes that exist while the largest weight is updated, per element of this weight.
        flops: FLOPs of matrix products in bfloat16.
        exchanged: bytes that are sent, to the updating rank and back, if one rank updates a whole sharded matrix.
        of_weight: function from a weight's qualified name and full shape to its cost, which replaces this cost;
            ``None`` if all weights cost the same.
    """

    state: float
    traffic: float
    workspace: float = 0.0
    workspace_of_one: float = 0.0
    flops: float = 0.0
    exchanged: float = 0.0
    of_weight: Callable[[str, tuple[int, ...]], OptimizerCost] | None = None


class ModelCosts(Protocol):
    """Protocol of the function :attr:`d9d_core.plugin.ModelSpec.cost`, which predicts the cost of a stage."""

    def __call__(self, config: object, stage: object, share: Share) -> StageCost:
        """Cost of a :class:`~d9d_core.model.Stage` of the model.

        Raises:
            BuildError: the share is impossible, for example because ``tp`` does not divide the number of heads.
        """
        ...


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Times of a pipeline's stages for one microbatch, in seconds.

    Attributes:
        forward, backward: time of each stage; the backward includes input and weight gradients.
        weight: time of the weight gradients of each stage, part of the backward.
        transfer: time to send one tensor from one rank to another.
    """

    forward: Sequence[float]
    backward: Sequence[float]
    weight: Sequence[float]
    transfer: float = 0.0


#: Signature of :attr:`d9d_core.plugin.ScheduleSpec.simulate`: seconds of one step with the programs of all ranks.
Simulate = Callable[[Sequence[Program], StageTimes], float]
