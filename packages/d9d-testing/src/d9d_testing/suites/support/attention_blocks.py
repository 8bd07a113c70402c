"""Calls of the op ``attention_block``: all turns of a ring of two ranks, computed in one process.

Shapes: B samples, S positions, N query heads, K key/value heads, D features per head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from d9d_core.kernel import OpSlot
from d9d_core.plugin import Ref
from torch import Tensor

_RANKS = 2


def block_slot(static: Mapping[str, Any]) -> OpSlot:
    """Op slot of ``attention_block`` in a ring, bound to the op's reference."""
    slot: OpSlot = Ref("d9d_parallel.context_parallel.blocks:BlockSlot").load()(
        "attention_block", Ref("d9d_parallel.context_parallel.blocks:ReferenceBlocks").load()(), **static
    )
    return slot


def attend_in_turns(slot: OpSlot, query: Tensor, key: Tensor, value: Tensor, documents: Any) -> Tensor:
    """Attention over all positions, combined from all turns of all ranks of a ring.

    Args:
        slot: op slot; its static facts include the window and the kind of mask.
        query: [B, S, N, D].
        key: [B, S, K, D].
        value: [B, S, K, D].
        documents: int64 [B, S] or ``DocumentBlocks``; ``None`` if a sample is one document.

    Returns:
        Output [B, S, N, D].
    """
    more = {name: slot.static[name] for name in ("mask",) if name in slot.static}
    parts = list(_parts(slot.function, query, documents, slot.static.get("window"), more))
    out: Tensor = _Turns.apply(query, key, value, slot.function, parts)
    return out


def _parts(
    blocks: Any, query: Tensor, documents: Any, window: int | None, more: Mapping[str, Any]
) -> Iterator[tuple[Any, ...]]:
    """Yield the positions of queries, the positions of keys, and the mask of each block in each turn of the ring."""
    length, device = query.shape[1], query.device
    size = length // (2 * _RANKS)
    chunks = [range(number * size, (number + 1) * size) for number in range(2 * _RANKS)]
    runs = [(chunks[rank], chunks[-1 - rank]) for rank in range(_RANKS)]  # in zigzag order
    places = [torch.cat([torch.arange(run.start, run.stop, device=device) for run in of_rank]) for of_rank in runs]
    for mine, own in zip(runs, places, strict=True):
        for theirs, others in zip(runs, places, strict=True):
            for rows, columns, mask in blocks.prepare(mine, theirs, documents, window, device, **more):
                yield own[rows], others[columns], mask


class _Turns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, blocks: Any, parts: list[Any]) -> Tensor:
        wide = torch.promote_types(query.dtype, torch.float32)
        found = [
            (rows, *blocks(query[:, rows], key[:, columns], value[:, columns], mask)) for rows, columns, mask in parts
        ]
        total = torch.full(query.shape[:3], -math.inf, dtype=wide, device=query.device)
        for rows, _, of_part in found:
            total[:, rows] = torch.logaddexp(total[:, rows], of_part.to(wide))
        out = torch.zeros(query.shape, dtype=wide, device=query.device)
        for rows, part, of_part in found:
            out[:, rows] += part.to(wide) * (of_part - total[:, rows]).exp().unsqueeze(-1)
        result = out.to(query.dtype)
        ctx.blocks, ctx.parts = blocks, parts
        ctx.save_for_backward(query, key, value, result, total)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, total = ctx.saved_tensors
        grads = [torch.zeros(one.shape, dtype=total.dtype, device=one.device) for one in (query, key, value)]
        for rows, columns, mask in ctx.parts:
            inputs = query[:, rows], key[:, columns], value[:, columns], out[:, rows], total[:, rows]
            added = ctx.blocks.backward(grad[:, rows], *inputs, mask)
            for of, place, more in zip(grads, (rows, columns, columns), added, strict=True):
                of[:, place] += more
        of_query, of_key, of_value = (of.to(query.dtype) for of in grads)
        return of_query, of_key, of_value, None, None
