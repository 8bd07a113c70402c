"""Block masks of FlexAttention, made from block borders: the work grows with (S / 128)^2, not with S^2.

Shapes: B samples, S positions, Q blocks of queries and Q blocks of keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

#: Positions of a block; the default of torch.
BLOCK = 128


def block_mask(documents: Tensor | None, length: int, window: int | None, device: torch.device) -> BlockMask:
    """Block mask for ``flex_attention``: causal, within documents and windows, the same for all heads.

    About sixty small kernels make the mask, without waiting for the device and without compilation.

    Args:
        documents: int64 [B, S]; ``None`` if a sample is one document.
        length: S.
        window: number of positions that a query sees, including its own; ``None`` for all.
        device: device of queries and keys.
    """
    # Imports torch's symbolic shapes, which takes a second.
    from torch.nn.attention.flex_attention import BlockMask

    # Kernels look up documents for each score of a partly visible block: narrow numbers are faster.
    numbers = None if documents is None else documents.to(torch.int32)

    def seen(sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:  # noqa: ARG001
        near = query >= key
        if window is not None:
            near = near & (query - key < window)
        if numbers is None:
            return near
        return near & (numbers[sample, query] == numbers[sample, key])

    partly, wholly = visible_blocks(numbers, length, window, device)
    return BlockMask.from_kv_blocks(
        *_listed(partly), *_listed(wholly), BLOCK_SIZE=BLOCK, mask_mod=seen, seq_lengths=(length, length)
    )


def queries_block_mask(
    documents: Tensor | None, queries: Sequence[range], length: int, window: int | None, device: torch.device
) -> BlockMask:
    """Block mask of queries at some positions and all S keys; see :func:`positions_block_mask`.

    Args:
        documents: int64 [B, S]; ``None`` if a sample is one document.
        queries: positions of the queries, in runs.
        length: S.
        window: number of positions that a query sees, including its own; ``None`` for all.
        device: device of queries and keys.
    """
    return positions_block_mask(documents, queries, [range(length)], window, device)


def positions_block_mask(
    documents: Tensor | None,
    queries: Sequence[range],
    keys: Sequence[range],
    window: int | None,
    device: torch.device,
) -> BlockMask:
    """Block mask of queries and keys at some positions, with the rules of :func:`block_mask`.

    Blocks are excluded by their nearest and farthest pair of positions, so the queries of a block should be at adjacent
    positions, and its keys too.

    Args:
        documents: int64 [B, S]; ``None`` if a sample is one document.
        queries: positions of the queries, in runs.
        keys: positions of the keys, in runs.
        window: number of positions that a query sees, including its own; ``None`` for all.
        device: device of queries and keys.
    """
    from torch.nn.attention.flex_attention import BlockMask

    places, others = _places(queries, device), _places(keys, device)  # [Q], [T]
    of_queries = of_keys = None
    if documents is not None:
        numbers = documents.to(torch.int32)
        of_queries, of_keys = (torch.cat([numbers[:, r.start : r.stop] for r in runs], 1) for runs in (queries, keys))

    def seen(sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:  # noqa: ARG001
        behind = places[query] - others[key]
        near = behind >= 0
        if window is not None:
            near = near & (behind < window)
        if of_keys is None or of_queries is None:
            return near
        return near & (of_queries[sample, query] == of_keys[sample, key])

    first, last = _ranges(places[None])
    start, end = _ranges(others[None])  # [1, blocks]
    farthest, nearest = last[:, :, None] - start[:, None], first[:, :, None] - end[:, None]  # [1, Q, K], for each pair
    some, whole = farthest >= 0, nearest >= 0
    if window is not None:
        some, whole = some & (nearest < window), whole & (farthest < window)
    if len(others) % BLOCK:  # padding behind the keys is not visible
        whole = whole & (torch.arange(end.shape[1], device=device) < end.shape[1] - 1)
    if of_keys is not None and of_queries is not None:
        (low, high), (least, most) = _ranges(of_queries), _ranges(of_keys)  # [B, blocks]
        some = some & (low[:, :, None] <= most[:, None]) & (least[:, None] <= high[:, :, None])
        one, alike = low == high, least == most
        whole = whole & (one[:, :, None] & alike[:, None]) & (low[:, :, None] == least[:, None])
    return BlockMask.from_kv_blocks(
        *_listed(some & ~whole),
        *_listed(whole),
        BLOCK_SIZE=BLOCK,
        mask_mod=seen,
        seq_lengths=(len(places), len(others)),
    )


def _places(runs: Sequence[range], device: torch.device) -> Tensor:
    places = [torch.arange(run.start, run.stop, dtype=torch.int32, device=device) for run in runs]
    return torch.cat(places)


def _ranges(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Minimum and maximum in each block of a tensor [B, n], [B, blocks] each."""
    missing = -numbers.shape[1] % BLOCK
    blocks = torch.cat([numbers, numbers[:, -1:].expand(-1, missing)], dim=1).view(len(numbers), -1, BLOCK)
    return blocks.amin(-1), blocks.amax(-1)


def visible_blocks(
    documents: Tensor | None, length: int, window: int | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Compute the partly visible and the wholly visible blocks of the score matrix, for a block mask.

    A block counts as partly visible unless the smallest and largest document indices of its queries and keys exclude
    it. If documents are numbered in order, as in packed samples, every partly visible block has a visible score.

    Args:
        documents: integers [B, S]; ``None`` if a sample is one document.
        length: S.
        window: number of positions that a query sees, including its own; ``None`` for all.
        device: device of the results.

    Returns:
        Two bools [B, Q, Q], B = 1 without documents; ``[..., query block, key block]``. No block is true in both.
    """
    count = -(-length // BLOCK)
    number = torch.arange(count, device=device)
    behind = number[:, None] - number  # [Q, Q], in blocks
    some, whole = behind >= 0, behind > 0
    if window is not None:  # a block's nearest and farthest pair of positions
        some = some & (BLOCK * behind - (BLOCK - 1) < window)
        whole = whole & (BLOCK * behind + (BLOCK - 1) < window)
    missing = count * BLOCK - length
    if missing:  # padding behind the sample is not visible
        whole = whole & (number[:, None] < count - 1)
    some, whole = some[None], whole[None]
    if documents is not None:
        padded = torch.cat([documents, documents[:, -1:].expand(-1, missing)], dim=1)
        blocks = padded.view(-1, count, BLOCK)
        low, high = blocks.amin(-1), blocks.amax(-1)  # [B, Q]
        some = some & (low[:, :, None] <= high[:, None]) & (low[:, None] <= high[:, :, None])
        one = low == high
        whole = whole & (one[:, :, None] & one[:, None]) & (low[:, :, None] == low[:, None])
    return some & ~whole, whole


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Number of chosen key blocks per query block, int32 [B, 1, Q], and all key blocks, chosen first, [B, 1, Q, Q]."""
    chosen = blocks[:, None].to(torch.int32)
    places = torch.argsort(chosen, dim=-1, descending=True, stable=True)
    return chosen.sum(dim=-1, dtype=torch.int32), places.to(torch.int32)
