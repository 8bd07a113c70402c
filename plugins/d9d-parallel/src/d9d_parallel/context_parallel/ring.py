"""Ring attention (method ``ring``): keys and values are passed around, and no rank ever has all of them.

Liu et al. 2023, "Ring Attention with Blockwise Transformers for Near-Infinite Context", section 3. While a rank
computes with the keys of one rank, it receives the next ones. Parts of the output are merged by their log-sum-exps in
float32; the backward recomputes scores, and gradients of keys and values are passed along with them, in float32. The
op ``attention_block`` (:mod:`d9d_parallel.context_parallel.blocks`) computes each part.

Shapes: B samples, S positions, N query heads, K key/value heads, D features of a head, R ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from d9d_core.attention import MASK_KINDS, Documents, MaskKind
from d9d_core.kernel import OpSlot
from d9d_engine.distributed.positions import ZigzagPositions
from torch import Tensor
from torch import distributed as dist
from torch.autograd.function import once_differentiable

from d9d_parallel.context_parallel.blocks import BlockSlot, ReferenceBlocks, merge_into
from d9d_parallel.ranks import Ranks


class RingAttention:
    """Ring attention of a rank's own queries to keys and values that are passed around.

    Args:
        ranks: ranks of the ring, in order.

    Attributes:
        mask_kinds: kinds of masks that it computes, named as in :mod:`d9d_core.attention`.
    """

    mask_kinds = MASK_KINDS

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.slot = BlockSlot("attention_block", ReferenceBlocks())
        # Not for Dynamo, which would trace the sends and receives, although they must start together.
        self._attend: Callable[..., Tensor] = torch.compiler.disable(_attend)  # type: ignore[no-untyped-call]

    @property
    def backend(self) -> str:
        """Name of the backend; layers with the same backend name and window share masks."""
        return f"attention_block.{self.slot.backend}"

    def op_slots(self) -> Mapping[str, OpSlot]:
        """Op slot of ``attention_block``, the attention to one rank's keys, by name."""
        return {"attention_block": self.slot}

    def prepare(
        self,
        documents: Documents,
        length: int,
        window: int | None,
        device: torch.device,
        *,
        mask: MaskKind = "causal",
    ) -> Turns:
        """Prepare masks for each turn (attention to the keys of one rank), for all layers with this window.

        Args:
            documents: document index of each position, int64 [B, S], or a ``DocumentBlocks`` for masks with blocks;
                ``None`` if a sample is one document.
            length: S.
            window: number of positions that a query attends to, including its own; ``None`` for all.
            device: device of queries and keys.
            mask: kind of the mask.
        """
        plan = Plan(self.ranks, length // (2 * self.ranks.size), documents, window, device, self.slot.function, mask)
        return Turns([plan.parts(plan.source(turn)) for turn in range(self.ranks.size)])

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        documents: Turns | Documents,
        window: int | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Compute attention of a rank's own queries. Collective over the ring, in forward and backward.

        Args:
            query: [B, S / R, N, D]; positions in zigzag order, as for keys and values.
            key: [B, S / R, K, D].
            value: [B, S / R, K, D].
            documents: result of :meth:`prepare`; or its argument ``documents``.
            window: number of positions that a query attends to, including its own; ``None`` for all.
            sinks: [N], for each head a score that takes part in the softmax without a value; ``None`` for none.

        Returns:
            [B, S / R, N, D] in the dtype of the queries.
        """
        return self._attend(query, key, value, documents, window, self, sinks)


class Part(NamedTuple):
    """Part of the attention scores of a turn, the step in which a rank computes with the keys of one rank.

    Attributes:
        queries: slice of the rank's own queries.
        keys: slice of the keys of the turn's rank.
        mask: data of the backend for this part.
    """

    queries: slice
    keys: slice
    mask: Any


class Turns:
    """Turns of a ring, with their masks. A plain object, because FSDP's mixed precision would cast tensors in a tuple.

    Args:
        parts: parts of each turn.
    """

    def __init__(self, parts: Sequence[Sequence[Part]]) -> None:
        self.parts = parts


@dataclass(frozen=True)
class Plan:
    """Plan of a ring attention: the chunks of positions of each rank.

    Attributes:
        ranks: ranks of the ring.
        chunk: number of positions of a chunk; each rank has two chunks.
        documents: document index of each position, int64 [B, S], or a ``DocumentBlocks`` for masks with blocks;
            ``None`` if a sample is one document.
        window: number of positions that a query attends to; ``None`` for all.
        device: device of queries and keys.
        blocks: backend of the op ``attention_block``.
        mask: kind of the mask.
    """

    ranks: Ranks
    chunk: int
    documents: Documents
    window: int | None
    device: torch.device
    blocks: Any
    mask: MaskKind = "causal"

    def parts(self, source: int) -> Sequence[Part]:
        """Parts of the attention of this rank's queries to one rank's keys, without parts that are masked out."""
        mine, theirs = (self._positions(rank) for rank in (self.ranks.rank, source))
        more = {} if self.mask == "causal" else {"mask": self.mask}
        found = self.blocks.prepare(mine, theirs, self.documents, self.window, self.device, **more)
        return [Part(*part) for part in found]

    def source(self, turn: int) -> int:
        """Index in the ring of the rank whose keys are here in a turn; in turn 0, this rank."""
        return (self.ranks.rank - turn) % self.ranks.size

    def _positions(self, rank: int) -> tuple[range, ...]:
        chunks = ZigzagPositions.chunks(self.ranks.size, rank)
        return tuple(range(number * self.chunk, (number + 1) * self.chunk) for number in chunks)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, turns: Turns, ring: RingAttention
    ) -> Tensor:
        blocks, last = ring.slot.function, len(turns.parts) - 1
        merged = Merged(query)
        here = torch.stack([key, value])
        for turn, parts in enumerate(turns.parts):
            coming = None if turn == last else Passing(here, ring.ranks)
            for mine, theirs, mask in parts:
                merged.add(mine, *blocks(query[:, mine], here[0][:, theirs], here[1][:, theirs], mask))
            if coming is not None:
                here = coming.wait()
        out, total = merged.found
        if sinks is not None:  # added once, after merging: each sink is a score without a value
            of_keys, total = total, torch.logaddexp(total, sinks.to(total.dtype))
            out = out * (of_keys - total).exp().unsqueeze(-1)
        result = out.to(query.dtype)
        ctx.turns, ctx.ring = turns, ring
        ctx.save_for_backward(query, key, value, sinks, result, total)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, result, total = ctx.saved_tensors
        of_sinks = None if sinks is None else _of_sinks(grad, result, total, sinks)
        turns, ring = ctx.turns, ctx.ring
        blocks, last = ring.slot.function, len(turns.parts) - 1
        of_query = PlacedSum(torch.empty(query.shape, dtype=total.dtype, device=query.device))
        here = torch.stack([key, value])
        travelling: Passing | None = None
        for turn, parts in enumerate(turns.parts):
            coming = None if turn == last else Passing(here, ring.ranks)
            of_here = torch.empty(here.shape, dtype=total.dtype, device=here.device)
            of_keys, of_values = (PlacedSum(one) for one in of_here)
            for mine, theirs, mask in parts:
                inputs = query[:, mine], here[0][:, theirs], here[1][:, theirs]
                added = blocks.backward(grad[:, mine], *inputs, result[:, mine], total[:, mine], mask)
                of_query.add(mine, added[0])
                of_keys.add(theirs, added[1])
                of_values.add(theirs, added[2])
            for sums in (of_keys, of_values):
                sums.finish()
            # While this rank computes its contribution to the gradients of these keys, the contributions of earlier
            # ranks arrive. After the last turn, this rank has the complete gradients of the next rank's keys and
            # sends them to that rank.
            travelling = Passing(of_here if travelling is None else travelling.wait().add_(of_here), ring.ranks)
            if coming is not None:
                here = coming.wait()
        assert travelling is not None  # a ring has at least one turn
        of_key, of_value = travelling.wait().unbind()
        grads = of_query.finish().to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype)
        return *grads, of_sinks, None, None


def _of_sinks(grad: Tensor, result: Tensor, total: Tensor, sinks: Tensor) -> Tensor:
    """Gradient of attention sinks [N]: minus the sum over queries of a sink's probability times ``grad @ result``."""
    shares = (sinks.to(total.dtype) - total).exp()
    return -(shares * (grad.to(total.dtype) * result.to(total.dtype)).sum(-1)).sum((0, 1)).to(sinks.dtype)


class PlacedSum:
    """Accumulator of gradients at slices of a tensor; it does not fill the whole memory with zeros first.

    Args:
        memory: [B, Q or T, heads, D], float32 or wider, uninitialised; holds the sum after :meth:`finish`.
    """

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self._is_begun = False

    def add(self, place: slice, part: Tensor) -> None:
        """Add the gradient of a slice, [B, Q or T of the slice, heads, D], in any dtype."""
        if self._is_begun:
            self._memory[:, place] += part
            return
        self._memory[:, place] = part
        self._memory[:, : place.start] = 0
        self._memory[:, place.stop :] = 0
        self._is_begun = True

    def finish(self) -> Tensor:
        """Return the sum of all added gradients; zeros where nothing was added."""
        return self._memory if self._is_begun else self._memory.zero_()


class Merged:
    """Attention merged over all keys added so far, in float32 or wider.

    Args:
        query: [B, Q, N, D].
    """

    def __init__(self, query: Tensor) -> None:
        self._shape, self._device = query.shape, query.device
        self._wide = torch.promote_types(query.dtype, torch.float32)
        self._found: tuple[Tensor, Tensor] | None = None

    def add(self, queries: slice, out: Tensor, total: Tensor) -> None:
        """Add the attention of some queries to further keys.

        Args:
            queries: slice of the queries.
            out: output for these queries, [B, Q, N, D].
            total: log-sum-exp of their scores, [B, Q, N]; minus infinity without keys.
        """
        if self._found is None and out.shape == self._shape:  # the first part replaces the zeros
            plain = torch.contiguous_format
            whole, of_whole = (one.to(self._wide, copy=True, memory_format=plain) for one in (out, total))
            self._found = whole, of_whole
        else:
            whole, of_whole = self.found
            merge_into(whole[:, queries], of_whole[:, queries], out, total)

    @property
    def found(self) -> tuple[Tensor, Tensor]:
        """Output [B, Q, N, D] and log-sum-exp [B, Q, N] of the attention to all keys added so far."""
        if self._found is None:
            out = torch.zeros(self._shape, dtype=self._wide, device=self._device)
            self._found = out, out.new_full(self._shape[:3], -math.inf)
        return self._found


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Turns | Documents,
    window: int | None,
    ring: RingAttention,
    sinks: Tensor | None,
) -> Tensor:
    device = query.device.type
    if ring.slot.backend != "reference" and torch.is_autocast_enabled(device):  # autocast ignores custom kernels
        dtype = torch.get_autocast_dtype(device)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    turns = documents
    if not isinstance(turns, Turns):
        kind: MaskKind = ring.slot.static.get("mask", "causal")
        turns = ring.prepare(turns, query.shape[1] * ring.ranks.size, window, query.device, mask=kind)
    with torch.autocast(device, enabled=False):  # autocast would round products of scores
        out: Tensor = _Ring.apply(query, key, value, sinks, turns, ring)
    return out


class Passing:
    """Ring exchange: sends a tensor to the next rank, receives one from the previous rank. Collective over the ring.

    Args:
        tensor: contiguous tensor of the same shape on all ranks; must not change before :meth:`wait`.
        ranks: ranks of the ring.
    """

    def __init__(self, tensor: Tensor, ranks: Ranks) -> None:
        self._sent, self._received = tensor, torch.empty_like(tensor)
        following, previous = (ranks.rank + 1) % ranks.size, (ranks.rank - 1) % ranks.size
        self._work = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, tensor, dist.get_global_rank(ranks.group, following), ranks.group),
                dist.P2POp(dist.irecv, self._received, dist.get_global_rank(ranks.group, previous), ranks.group),
            ]
        )

    def wait(self) -> Tensor:
        """Return the previous rank's tensor; later work on the current stream waits for it."""
        for work in self._work:
            work.wait()
        return self._received
