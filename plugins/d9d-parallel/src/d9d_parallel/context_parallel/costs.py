"""Costs of attention by each method of ``context_parallel``, from its config alone. Imports no torch.

Bytes and calls are those that :mod:`d9d_parallel.context_parallel.communication` declares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from d9d_core.cost import AttentionShape, ContextCost, Exchange, OpCost, StrategyCost
from d9d_core.errors import BuildError

from d9d_parallel.context_parallel.config import ContextParallelConfig

_FLOAT32 = 4


def context_parallel(config: ContextParallelConfig) -> StrategyCost:
    """Effect of ``context_parallel``."""
    return StrategyCost(context=AttentionCosts(config.method, config.head_ranks))


def alternatives(config: ContextParallelConfig) -> Sequence[ContextParallelConfig]:
    """Further methods: the other one of those that compute attention by a kernel."""
    other: Literal["ulysses", "all_gather"] = "ulysses" if config.method == "all_gather" else "all_gather"
    return [config.model_copy(update={"method": other, "head_ranks": None})]


@dataclass(frozen=True, slots=True)
class AttentionCosts:
    """Costs of context-parallel attention and its exchanges by a method; equal ones count as one in plans.

    Attributes:
        method: as in the config.
        head_ranks: ranks that swap heads, of ``hybrid``.
    """

    method: str
    head_ranks: int | None

    def __call__(self, op: OpCost, ranks: int) -> ContextCost:
        """Cost of an attention of own queries to all keys on so many ranks.

        Raises:
            BuildError: the ranks cannot share the heads.
        """
        assert op.attention is not None  # it is an attention
        if self.method == "all_gather":
            return _gathered(op, op.attention, ranks)
        if self.method == "ulysses":
            return _swapped(op, op.attention, ranks)
        inner = 1 if self.method == "ring" else self.head_ranks or 1
        if ranks % inner or inner == ranks:
            raise BuildError(f"head_ranks is {inner}, but mesh.cp is {ranks}")
        swapped = _swapped(op, op.attention, inner) if inner > 1 else ContextCost((op,))
        pairs = max(op.attention.key_value_heads, inner if inner > 1 else 0)
        ring = _ring(swapped.ops[0], replace(op.attention, key_value_heads=pairs), ranks // inner, inner)
        return replace(
            ring,
            ops=(*ring.ops, *(one for one in swapped.ops if one.attention is None)),
            exchanges=swapped.exchanges,
            backward_exchanges=(*swapped.backward_exchanges, *ring.backward_exchanges),
        )


def _gathered(op: OpCost, shape: AttentionShape, ranks: int) -> ContextCost:
    """Method ``all_gather``: all keys and values are gathered, and kept by attention."""
    own = 2 * _key_value_bytes(shape)
    # Both are joined, gathered and brought into order; their gradients are parted and summed.
    moved = 2 * own + 2 * ranks * own
    return ContextCost(
        (replace(op, kept=op.kept + (ranks - 1) * own), _copies("gathered keys", moved, moved)),
        (Exchange("all_gather", "cp", ranks * own),),
        (Exchange("reduce_scatter", "cp", ranks * own),),
    )


def _swapped(op: OpCost, shape: AttentionShape, ranks: int) -> ContextCost:
    """Method ``ulysses``: positions are swapped for heads, and back; few key/value heads travel several times.

    Raises:
        BuildError: the ranks cannot share the heads.
    """
    queries, pairs = shape.query_heads, shape.key_value_heads
    if queries % ranks or (pairs % ranks and ranks % pairs):
        raise BuildError(
            f"method ulysses shares heads over {ranks} ranks of cp, which do not divide {queries:g} query heads, or "
            f"neither divide nor repeat {pairs:g} key and value heads"
        )
    back = shape.width * shape.rows * queries * shape.features
    keys = 2 * _key_value_bytes(replace(shape, key_value_heads=max(pairs, ranks)))
    there = back + keys
    one, other = (Exchange("all_to_all", "cp", size, ranks) for size in (there, back))
    moved = 2 * (3 * there + 2 * back)  # packed, joined and parted
    # Repeated heads are kept as often; and the output as the projection behind it reads it.
    kept = op.kept + keys - 2 * _key_value_bytes(shape) + back
    return ContextCost((replace(op, kept=kept), _copies("swapped heads", moved, moved)), (one, other), (other, one))


def _ring(op: OpCost, shape: AttentionShape, ranks: int, stride: int) -> ContextCost:
    """Methods ``ring`` and ``hybrid``: keys and values go round beside attention, whose parts are merged in float32.

    A turn is computed by a kernel, as without ``cp``; on an H200 whole attentions took 0.98 to 1.16 of this.

    Args:
        op: attention of one rank.
        shape: with the key/value heads that travel.
        ranks: of the ring.
        stride: distance of its neighbours in ``cp``.
    """
    size, wide = 2 * _key_value_bytes(shape), max(shape.width, _FLOAT32)
    gradients = size * wide / shape.width
    # What each turn adds to sums in float32: read once, and the sum read and written.
    outputs = shape.rows * shape.query_heads * shape.features
    merged = ranks * (shape.width + 2 * wide) * outputs
    added = ranks * (shape.width + 2 * wide) * (outputs + size / shape.width)
    turn = Exchange("send", "cp", size, ranks, stride, ranks - 1)
    travelling = Exchange("send", "cp", gradients, ranks, stride, ranks - 1)
    # Gradients arrive a turn later than keys and values, and those of the last turn go home beside nothing.
    home = Exchange("send", "cp", gradients, ranks, stride)
    sums = 2 * wide * outputs + 3 * gradients
    return ContextCost((op, _copies("merged turns", merged, added)), (), (home,), (turn,), (turn, travelling), sums)


def _key_value_bytes(shape: AttentionShape) -> float:
    """Bytes of the keys, or values, of own positions."""
    return shape.width * shape.rows * shape.key_value_heads * shape.features


def _copies(name: str, traffic: float, backward_traffic: float) -> OpCost:
    return OpCost(name, "memory", traffic=traffic, backward_traffic=backward_traffic)
