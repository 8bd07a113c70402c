"""Attention in a ring (method ``ring``): keys and values go round, and no rank ever has those of all positions.

Liu et al. 2023, "Ring Attention with Blockwise Transformers for Near-Infinite Context", section 3. While a rank
computes with one part, the next one is on its way. Parts of the output are merged by the logarithms of their sums, in
float32; the backward computes scores again, and gradients of keys and values travel with them, in float32.

Shapes: B samples, S positions, N query heads, K key/value heads, D features of a head, R ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from d9d_engine.extend import ZigzagPositions
from torch import Tensor
from torch import distributed as dist
from torch.autograd.function import once_differentiable

from d9d_parallel.context_parallel.blocks import Block, attend, attend_backward, merge
from d9d_parallel.ranks import Ranks


class RingAttention:
    """Attention of a rank's own queries to keys and values that go round.

    Args:
        ranks: the ring, in its order.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        # Dynamo would look into sends and receives, which must start together.
        self._attend: Callable[..., Tensor] = torch.compiler.disable(_attend)  # type: ignore[no-untyped-call]

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None, window: int | None
    ) -> Tensor:
        """Compute attention of own queries. Collective over the ring, both ways.

        Args:
            query: [B, S / R, N, D], in zigzag order, as all that follows.
            key: [B, S / R, K, D].
            value: [B, S / R, K, D].
            documents: int64 [B, S]; ``None`` if a sample is one document.
            window: number of positions that a query sees, its own included; ``None`` for all.

        Returns:
            [B, S / R, N, D] in the dtype of the queries.
        """
        return self._attend(query, key, value, Plan(self.ranks, query.shape[1] // 2, documents, window))


@dataclass(frozen=True)
class Plan:
    """Plan of one attention: who has which chunks.

    Attributes:
        ranks: the ring.
        chunk: positions of a chunk; each rank has two.
        documents: int64 [B, S]; ``None`` if a sample is one document.
        window: number of positions that a query sees; ``None`` for all.
    """

    ranks: Ranks
    chunk: int
    documents: Tensor | None
    window: int | None

    def blocks(self, source: int) -> Iterator[tuple[slice, slice, Block]]:
        """Blocks of own queries and the keys of a rank in which something is seen: their places here and there."""
        for own, mine in enumerate(ZigzagPositions.chunks(self.ranks.size, self.ranks.rank)):
            for other, theirs in enumerate(ZigzagPositions.chunks(self.ranks.size, source)):
                numbers = self.documents
                of = None if numbers is None else (numbers[:, self._chunk(mine)], numbers[:, self._chunk(theirs)])
                block = Block(mine * self.chunk, theirs * self.chunk, of, self.window)
                if block.is_seen(self.chunk, self.chunk):
                    yield self._chunk(own), self._chunk(other), block

    def source(self, turn: int) -> int:
        """Rank whose keys are here in a turn; in the first, it is this rank."""
        return (self.ranks.rank - turn) % self.ranks.size

    def _chunk(self, number: int) -> slice:
        return slice(number * self.chunk, (number + 1) * self.chunk)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: Plan) -> Tensor:
        wide = torch.promote_types(query.dtype, torch.float32)
        out = torch.zeros(query.shape, dtype=wide, device=query.device)
        total = out.new_full(query.shape[:3], -math.inf)
        here = torch.stack([key, value])
        for turn in range(plan.ranks.size):
            coming = None if turn == plan.ranks.size - 1 else Passing(here, plan.ranks)
            for mine, theirs, block in plan.blocks(plan.source(turn)):
                part, of_part = attend(query[:, mine], here[0][:, theirs], here[1][:, theirs], block)
                out[:, mine], total[:, mine] = merge(out[:, mine], total[:, mine], part, of_part)
            if coming is not None:
                here = coming.wait()
        result = out.to(query.dtype)
        ctx.plan = plan
        ctx.save_for_backward(query, key, value, result, total)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, result, total = ctx.saved_tensors
        plan: Plan = ctx.plan
        delta = (grad.to(total.dtype) * result.to(total.dtype)).sum(dim=-1)
        of_query = torch.zeros(query.shape, dtype=total.dtype, device=query.device)
        here = torch.stack([key, value])
        travelling: Passing | None = None
        for turn in range(plan.ranks.size):
            coming = None if turn == plan.ranks.size - 1 else Passing(here, plan.ranks)
            of_here = torch.zeros(here.shape, dtype=total.dtype, device=here.device)
            for mine, theirs, block in plan.blocks(plan.source(turn)):
                keys, values = here[0][:, theirs], here[1][:, theirs]
                added = attend_backward(
                    query[:, mine], keys, values, block, grad[:, mine], total[:, mine], delta[:, mine]
                )
                of_query[:, mine] += added[0]
                of_here[0][:, theirs] += added[1]
                of_here[1][:, theirs] += added[2]
            # The gradients of these keys by earlier ranks arrive while this rank computes its own; after the last turn
            # those of the next rank's keys are complete here, and go home.
            travelling = Passing(of_here if travelling is None else travelling.wait().add_(of_here), plan.ranks)
            if coming is not None:
                here = coming.wait()
        assert travelling is not None  # there is a turn
        of_key, of_value = travelling.wait().unbind()
        return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype), None


def _attend(query: Tensor, key: Tensor, value: Tensor, plan: Plan) -> Tensor:
    with torch.autocast(query.device.type, enabled=False):  # it would round products of scores
        out: Tensor = _Ring.apply(query, key, value, plan)
    return out


class Passing:
    """Tensor on its way to the next rank, while that of the previous one comes. Collective over the ring.

    Args:
        tensor: contiguous, of one shape on all ranks; it must not change before :meth:`wait`.
        ranks: the ring.
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
        """Tensor of the previous rank; later work on the device comes after its arrival."""
        for work in self._work:
            work.wait()
        return self._received
