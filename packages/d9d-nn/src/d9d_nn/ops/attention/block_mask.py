"""Block masks of FlexAttention, made from block borders: the work grows with (S / 128)^2, not with S^2.

Shapes: B samples, S positions, Q blocks of queries and Q blocks of keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from d9d_core.attention import Documents, MaskKind, documents_and_blocks
from torch import Tensor

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

#: Positions of a block; the default of torch.
BLOCK = 128


def block_mask(
    documents: Documents, length: int, window: int | None, device: torch.device, *, mask: MaskKind = "causal"
) -> BlockMask:
    """Block mask for ``flex_attention``: of one kind, within documents and windows, the same for all heads.

    About sixty small kernels make the mask, without waiting for the device and without compilation.

    Args:
        documents: int64 [B, S] or ``DocumentBlocks``; ``None`` if a sample is one document.
        length: S.
        window: number of positions that a query sees, including its own; ``None`` for all.
        device: device of queries and keys.
        mask: kind of the mask, see :func:`d9d_nn.ops.attention.reference.visible`.
    """
    # Kernels read document numbers for each score of a partly visible block, so int32 is faster than int64.
    numbers, groups = _narrow(documents)

    def seen(sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:  # noqa: ARG001
        near = _is_near(query - key, window, mask)
        if groups is not None:
            near = near | ((groups[sample, query] == groups[sample, key]) & (groups[sample, key] >= 0))
        if numbers is None:
            return near
        return near & (numbers[sample, query] == numbers[sample, key])

    partly, wholly = visible_blocks(numbers, length, window, device, groups=groups, mask=mask)
    return _mask_of(partly, wholly, seen, (length, length))


def queries_block_mask(
    documents: Documents,
    queries: Sequence[range],
    length: int,
    window: int | None,
    device: torch.device,
    *,
    mask: MaskKind = "causal",
) -> BlockMask:
    """Block mask of queries at some positions and all S keys; see :func:`positions_block_mask`.

    Args:
        documents: int64 [B, S] or ``DocumentBlocks``; ``None`` if a sample is one document.
        queries: positions of the queries, as contiguous ranges.
        length: S.
        window: number of positions that a query sees, including its own; ``None`` for all.
        device: device of queries and keys.
        mask: kind of the mask.
    """
    return positions_block_mask(documents, queries, [range(length)], window, device, mask=mask)


def positions_block_mask(
    documents: Documents,
    queries: Sequence[range],
    keys: Sequence[range],
    window: int | None,
    device: torch.device,
    *,
    mask: MaskKind = "causal",
) -> BlockMask:
    """Block mask of queries and keys at some positions, with the rules of :func:`block_mask`.

    Blocks are excluded by their nearest and farthest pair of positions, so the queries of a block should be at adjacent
    positions, and its keys too.

    Args:
        documents: int64 [B, S] or ``DocumentBlocks``; ``None`` if a sample is one document.
        queries: positions of the queries, as contiguous ranges.
        keys: positions of the keys, as contiguous ranges.
        window: number of positions that a query sees, including its own; ``None`` for all.
        device: device of queries and keys.
        mask: kind of the mask.
    """
    places, others = _places(queries, device), _places(keys, device)  # [Q], [T]
    (of_queries, of_keys), (groups, key_groups) = (_at(numbers, queries, keys) for numbers in _narrow(documents))

    def seen(sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:  # noqa: ARG001
        near = _is_near(places[query] - others[key], window, mask)
        if groups is not None and key_groups is not None:
            near = near | ((groups[sample, query] == key_groups[sample, key]) & (key_groups[sample, key] >= 0))
        if of_keys is None or of_queries is None:
            return near
        return near & (of_queries[sample, query] == of_keys[sample, key])

    first, last = _ranges(places[None])
    start, end = _ranges(others[None])  # [1, blocks]
    farthest, nearest = last[:, :, None] - start[:, None], first[:, :, None] - end[:, None]  # [1, Q, K], for each pair
    some, whole = _near_blocks(nearest, farthest, window, mask)
    if groups is not None and key_groups is not None:
        some = some | _share_a_block(_ranges(groups), _ranges(key_groups))
    if len(others) % BLOCK:  # the padding after the keys, up to a whole block, is not visible
        whole = whole & (torch.arange(end.shape[1], device=device) < end.shape[1] - 1)
    if of_keys is not None and of_queries is not None:
        (low, high), (least, most) = _ranges(of_queries), _ranges(of_keys)  # [B, blocks]
        some = some & (low[:, :, None] <= most[:, None]) & (least[:, None] <= high[:, :, None])
        one, alike = low == high, least == most
        whole = whole & (one[:, :, None] & alike[:, None]) & (low[:, :, None] == least[:, None])
    return _mask_of(some & ~whole, whole, seen, (len(places), len(others)))


def _narrow(documents: Documents) -> tuple[Tensor | None, Tensor | None]:
    """Documents and blocks as int32 [B, S], each ``None`` if not given."""
    numbers, groups = documents_and_blocks(documents)
    return None if numbers is None else numbers.to(torch.int32), None if groups is None else groups.to(torch.int32)


def _at(
    numbers: Tensor | None, queries: Sequence[range], keys: Sequence[range]
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Numbers [B, S] at the positions of queries and of keys, [B, Q] and [B, T]."""
    if numbers is None:
        return None, None
    of_queries, of_keys = (torch.cat([numbers[:, r.start : r.stop] for r in runs], 1) for runs in (queries, keys))
    return of_queries, of_keys


def _is_near(behind: Tensor, window: int | None, mask: MaskKind) -> Tensor:
    """Whether a query sees a key that is ``behind`` positions before it, by direction and window."""
    if mask == "bidirectional":
        behind = behind.abs()
    near = behind >= 0
    return near if window is None else near & (behind < window)


def _near_blocks(nearest: Tensor, farthest: Tensor, window: int | None, mask: MaskKind) -> tuple[Tensor, Tensor]:
    """Blocks that are visible in part or in whole, and blocks that are wholly visible, by direction and window.

    Args:
        nearest: position of a block's first query minus position of its last key.
        farthest: position of a block's last query minus position of its first key.
        window: number of positions that a query sees, including its own; ``None`` for all.
        mask: kind of the mask.
    """
    if mask == "bidirectional":
        limit = window if window is not None else torch.iinfo(torch.int32).max
        return (nearest < limit) & (farthest > -limit), (farthest < limit) & (nearest > -limit)
    some, whole = farthest >= 0, nearest >= 0
    return (some, whole) if window is None else (some & (nearest < window), whole & (farthest < window))


def _share_a_block(queries: tuple[Tensor, Tensor], keys: tuple[Tensor, Tensor]) -> Tensor:
    """Whether blocks of queries and of keys may share a mask's block, by their smallest and largest numbers [B, n]."""
    (low, high), (least, most) = queries, keys
    overlap = (low[:, :, None] <= most[:, None]) & (least[:, None] <= high[:, :, None])
    return overlap & (high[:, :, None] >= 0) & (most[:, None] >= 0)


def _places(runs: Sequence[range], device: torch.device) -> Tensor:
    places = [torch.arange(run.start, run.stop, dtype=torch.int32, device=device) for run in runs]
    return torch.cat(places)


def _ranges(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Minimum and maximum of numbers [B, n] in each block of positions, [B, blocks] each."""
    missing = -numbers.shape[1] % BLOCK
    blocks = torch.cat([numbers, numbers[:, -1:].expand(-1, missing)], dim=1).view(len(numbers), -1, BLOCK)
    return blocks.amin(-1), blocks.amax(-1)


def visible_blocks(
    documents: Tensor | None,
    length: int,
    window: int | None,
    device: torch.device,
    *,
    groups: Tensor | None = None,
    mask: MaskKind = "causal",
) -> tuple[Tensor, Tensor]:
    """Compute the partly visible and the wholly visible blocks of the score matrix, for a block mask.

    A block counts as partly visible unless the smallest and largest document indices of its queries and keys exclude
    it. If documents are numbered in order, as in packed samples, every partly visible block has a visible score.

    Args:
        documents: integers [B, S]; ``None`` if a sample is one document.
        length: S.
        window: number of positions that a query sees, including its own; ``None`` for all.
        device: device of the results.
        groups: integers [B, S], the mask's block of each position; ``None`` without blocks.
        mask: kind of the mask.

    Returns:
        Two bools [B, Q, Q], B = 1 without documents; ``[..., query block, key block]``. No block is true in both.
    """
    count = -(-length // BLOCK)
    number = torch.arange(count, device=device)
    behind = number[:, None] - number  # [Q, Q], in blocks
    nearest, farthest = BLOCK * behind - (BLOCK - 1), BLOCK * behind + (BLOCK - 1)
    some, whole = _near_blocks(nearest, farthest, window, mask)
    missing = count * BLOCK - length
    if missing:  # the padding after the sample, up to a whole block, is not visible
        whole = whole & (number[:, None] < count - 1) & (number < count - 1)
    some, whole = some[None], whole[None]
    if groups is not None:
        of_blocks = _ranges(groups)
        some = some | _share_a_block(of_blocks, of_blocks)
    if documents is not None:
        padded = torch.cat([documents, documents[:, -1:].expand(-1, missing)], dim=1)
        blocks = padded.view(-1, count, BLOCK)
        low, high = blocks.amin(-1), blocks.amax(-1)  # [B, Q]
        some = some & (low[:, :, None] <= high[:, None]) & (low[:, None] <= high[:, :, None])
        one = low == high
        whole = whole & (one[:, :, None] & one[:, None]) & (low[:, :, None] == low[:, None])
    return some & ~whole, whole


def _mask_of(partly: Tensor, wholly: Tensor, seen: Callable[..., Tensor], lengths: tuple[int, int]) -> BlockMask:
    """Block mask of partly visible blocks, bool [B, Q, K], and of wholly visible blocks, bool [B or 1, Q, K].

    Compiled kernels read both lists with one batch index and do not check it, so both get the same number of samples.
    """
    # Imported late, because this imports torch's symbolic shapes, which takes a second.
    from torch.nn.attention.flex_attention import BlockMask

    return BlockMask.from_kv_blocks(
        *_listed(partly), *_listed(wholly.expand_as(partly)), BLOCK_SIZE=BLOCK, mask_mod=seen, seq_lengths=lengths
    )


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Number of chosen key blocks per query block, int32 [B, 1, Q], and all key blocks, chosen first, [B, 1, Q, Q]."""
    chosen = blocks[:, None].to(torch.int32)
    places = torch.argsort(chosen, dim=-1, descending=True, stable=True)
    return chosen.sum(dim=-1, dtype=torch.int32), places.to(torch.int32)
