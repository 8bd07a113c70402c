"""Costs of attention by each method of ``context_parallel``, from its config alone. Imports no torch.

Bytes and calls match :mod:`d9d_parallel.context_parallel.communication`.
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
    """Effect of the strategy ``context_parallel`` on the planner's costs."""
    return StrategyCost(context=AttentionCosts(config.method, config.head_ranks))


def alternatives(config: ContextParallelConfig) -> Sequence[ContextParallelConfig]:
    """Further config for ``d9d plan``: method ``ulysses`` for ``all_gather``, ``all_gather`` for other methods."""
    other: Literal["ulysses", "all_gather"] = "ulysses" if config.method == "all_gather" else "all_gather"
    return [config.model_copy(update={"method": other, "head_ranks": None})]


@dataclass(frozen=True, slots=True)
class AttentionCosts:
    """Function that computes the costs of context-parallel attention; ``d9d plan`` uses it as a part of a cache key.

    Attributes:
        method: method of the config.
        head_ranks: number of ranks that swap heads in ``hybrid``.
    """

    method: str
    head_ranks: int | None

    def __call__(self, op: OpCost, ranks: int) -> ContextCost:
        """Cost of the attention of one rank's own queries to all keys, with a given number of ranks of ``cp``.

        Raises:
            BuildError: the heads cannot be divided over the ranks.
        """
        assert op.attention is not None  # ops of attention have it
        if self.method == "all_gather":
            return _gathered(op, op.attention, ranks)
        if self.method == "ulysses":
            return _swapped(op, op.attention, ranks)
        inner = 1 if self.method == "ring" else self.head_ranks or 1
        if ranks % inner or inner == ranks:
            raise BuildError(
                f"context_parallel: head_ranks is {inner}, not a smaller divisor of mesh.cp, {ranks}; choose one"
            )
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
    """Method ``all_gather``: all keys and values are gathered, and stored for the backward."""
    if shape.latent:
        return _gathered_latents(op, shape, ranks)
    own = 2 * _key_value_bytes(shape)
    # Keys and values are concatenated, gathered and reordered; their gradients are split and summed.
    moved = 2 * own + 2 * ranks * own
    return ContextCost(
        (replace(op, kept=op.kept + (ranks - 1) * own), _copies("gathered keys", moved, moved)),
        (Exchange("all_gather", "cp", ranks * own),),
        (Exchange("reduce_scatter", "cp", ranks * own),),
    )


def _gathered_latents(op: OpCost, shape: AttentionShape, ranks: int) -> ContextCost:
    """Method ``all_gather`` of latents: each rank computes the keys and values of all positions."""
    own, others = shape.width * shape.rows * shape.latent, (ranks - 1) * shape.rows
    moved = 2 * own + 2 * ranks * own
    flops = 2 * others * shape.latent * shape.expanded
    traffic = shape.width * (others * (shape.latent + shape.expanded) + shape.latent * shape.expanded)
    kept = (ranks - 1) * own
    return ContextCost(
        (
            replace(op, kept=op.kept + (ranks - 1) * 2 * _key_value_bytes(shape)),
            OpCost("keys of other ranks", "product", flops, 2 * flops, traffic, 2 * traffic, kept, others),
            _copies("gathered latents", moved, moved),
        ),
        (Exchange("all_gather", "cp", ranks * own),),
        (Exchange("reduce_scatter", "cp", ranks * own),),
    )


def _swapped(op: OpCost, shape: AttentionShape, ranks: int) -> ContextCost:
    """Method ``ulysses``: positions are swapped for heads and back; if ranks outnumber key/value heads, heads repeat.

    Raises:
        BuildError: the heads cannot be divided over the ranks.
    """
    queries, pairs = shape.query_heads, shape.key_value_heads
    if queries % ranks or (pairs % ranks and ranks % pairs):
        raise BuildError(
            f"methods ulysses and hybrid divide heads, here over {ranks} ranks of cp, which does not fit {queries:g} "
            f"query heads and {pairs:g} key and value heads; choose another number of ranks, or method all_gather"
        )
    back = shape.width * shape.rows * queries * shape.features
    keys = 2 * _key_value_bytes(replace(shape, key_value_heads=max(pairs, ranks)))
    there = back + keys
    one, other = (Exchange("all_to_all", "cp", size, ranks) for size in (there, back))
    moved = 2 * (3 * there + 2 * back)  # bytes read and written to pack, join and split tensors
    # Repeated heads are stored repeatedly; the output is stored again as the input of the following projection.
    kept = op.kept + keys - 2 * _key_value_bytes(shape) + back
    return ContextCost((replace(op, kept=kept), _copies("swapped heads", moved, moved)), (one, other), (other, one))


def _ring(op: OpCost, shape: AttentionShape, ranks: int, stride: int) -> ContextCost:
    """Method ``ring``, and the ring of ``hybrid``: keys and values are passed around; outputs are merged in float32.

    The attention to one rank's keys is estimated as a kernel without ``cp``; on an H200, the attention to all keys took
    0.98 to 1.16 times as long as this estimate.

    Args:
        op: attention of one rank.
        shape: shape of the attention, with the number of key/value heads that are sent.
        ranks: number of ranks of the ring.
        stride: distance of neighbours of the ring along ``cp``.
    """
    size, wide = 2 * _key_value_bytes(shape), max(shape.width, _FLOAT32)
    gradients = size * wide / shape.width
    # Each turn adds its result to a float32 sum: the result is read, the sum is read and written.
    outputs = shape.rows * shape.query_heads * shape.features
    merged = ranks * (shape.width + 2 * wide) * outputs
    added = ranks * (shape.width + 2 * wide) * (outputs + size / shape.width)
    turn = Exchange("send", "cp", size, ranks, stride, ranks - 1)
    travelling = Exchange("send", "cp", gradients, ranks, stride, ranks - 1)
    # Gradients arrive a turn later than keys and values; the transfer after the last turn overlaps with nothing.
    home = Exchange("send", "cp", gradients, ranks, stride)
    sums = 2 * wide * outputs + 3 * gradients
    return ContextCost((op, _copies("merged turns", merged, added)), (), (home,), (turn,), (turn, travelling), sums)


def _key_value_bytes(shape: AttentionShape) -> float:
    """Bytes of the keys (or of the values) of a rank's own positions."""
    return shape.width * shape.rows * shape.key_value_heads * shape.features


def _copies(name: str, traffic: float, backward_traffic: float) -> OpCost:
    return OpCost(name, "memory", traffic=traffic, backward_traffic=backward_traffic)
