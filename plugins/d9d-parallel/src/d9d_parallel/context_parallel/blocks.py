"""Op ``attention_block``: attention of some queries to some keys, with log-sum-exps, by which blocks can be merged.

The slot has the same static facts as the op ``attention``. A backend is an object with these methods, which only queue
work on the device and must not synchronise with it; :class:`ReferenceBlocks` is the reference:

- ``prepare(queries, keys, documents, window, device) -> [(queries, keys, mask), ...]`` divides the block into parts.
  Positions of queries and keys are ranges in ascending order; ``documents`` is int64 [B, S] of all positions, a
  ``DocumentBlocks`` for masks with blocks, or ``None``; ``window`` is the number of positions that a query attends to,
  or ``None``. A part is a slice of the queries, a slice of the keys, and the backend's data for it. No query may attend
  to a key outside of the parts. For a kind of mask other than causal, which a backend's attribute ``mask_kinds`` must
  name, ``prepare`` also gets the keyword ``mask``, see :mod:`d9d_core.attention`.
- ``(query, key, value, mask) -> (out, total)`` computes a part, with the arguments and results of :func:`attend`.
- ``backward(grad, query, key, value, out, total, mask) -> gradients`` computes a part's contribution to the gradients,
  given output and log-sum-exps of the attention to all keys, with the arguments and results of
  :func:`attend_backward`.

The reference computes in float32 or wider, in tiles of queries; only one tile's scores exist at a time, also in the
backward, which recomputes them. Dao et al. 2022, "FlashAttention", sections 3.1 and B.2.

Shapes: B samples, Q queries and T keys of the block, N query heads, K key/value heads (N = K * G), D features of a
head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from d9d_core.attention import MASK_KINDS, Documents, MaskKind, documents_and_blocks, function_refusal
from d9d_core.errors import BuildError
from d9d_core.kernel import OpSlot
from torch import Tensor

#: Largest number of attention scores that the reference holds in memory at a time.
TILE = 2**26


@dataclass(frozen=True, slots=True)
class Block:
    """Block of the score matrix of context-parallel attention.

    Attributes:
        query, key: positions, in the sample, of the block's first query and first key.
        documents: document indices of queries and keys, int64 [B, Q] and [B, T]; ``None`` if a sample is one document.
        window: number of positions that a query attends to, including its own; ``None`` for all.
        kind: kind of the mask.
        groups: for masks of kinds with blocks, the block index of each query and key, int64 [B, Q] and [B, T]; ``None``
            for other kinds.
    """

    query: int
    key: int
    documents: tuple[Tensor, Tensor] | None = None
    window: int | None = None
    kind: MaskKind = "causal"
    groups: tuple[Tensor, Tensor] | None = None

    def is_seen(self, queries: int, keys: int) -> bool:
        """Whether some query may attend to some key, by their positions."""
        if self.groups is not None:  # block indices are on the device, so reading them would synchronise
            return True
        near = self.window is None or self.query - (self.key + keys - 1) < self.window
        if self.kind == "bidirectional":
            return near and (self.window is None or self.key - (self.query + queries - 1) < self.window)
        return near and self.query + queries > self.key

    def mask(self, rows: slice, keys: int, device: torch.device) -> Tensor | None:
        """Attention mask of some queries, bool [B or 1, rows, T]; ``None`` if they attend to all keys of the block."""
        first, last = self.query + rows.start, self.query + rows.stop - 1
        seen, two_ways = None, self.kind == "bidirectional"
        nearest, farthest = first - (self.key + keys - 1), last - self.key
        beyond = self.window is not None and (farthest >= self.window or (two_ways and -nearest >= self.window))
        if beyond or (nearest < 0 and not two_ways):
            places = torch.arange(self.key, self.key + keys, device=device)
            behind = torch.arange(first, last + 1, device=device)[:, None] - places
            behind = behind.abs() if two_ways else behind
            seen = behind >= 0 if self.window is None else (behind >= 0) & (behind < self.window)
        if self.groups is not None and seen is not None:
            of_queries, of_keys = self.groups
            own = of_queries[:, rows, None]
            seen = seen | ((own == of_keys[:, None]) & (own >= 0))
        if self.documents is not None:
            of_queries, of_keys = self.documents
            alike = of_queries[:, rows, None] == of_keys[:, None]
            return alike if seen is None else alike & seen
        return seen if seen is None or seen.dim() == 3 else seen[None]


class BlockSlot(OpSlot):
    """Slot of the op ``attention_block``, which refuses backends that do not compute its kind of mask."""

    def refusal(self, function: Callable[..., Any]) -> str | None:
        """Reason why a backend function cannot compute this slot's kind of mask; ``None`` if it can."""
        return function_refusal(self.static, function)

    def bind(self, backend: str, function: Callable[..., Any]) -> None:
        """Bind a backend's function to the slot.

        Raises:
            BuildError: the function does not compute the slot's kind of mask.
        """
        if (refusal := self.refusal(function)) is not None:
            raise BuildError(f"kernels.{self.op}: '{backend}' {refusal}; choose flex, or leave the choice to d9d")
        super().bind(backend, function)


class ReferenceBlocks:
    """Reference backend in plain PyTorch: one block for each pair of a run of queries and a run of keys.

    Attributes:
        mask_kinds: kinds of masks that it computes, named as in :mod:`d9d_core.attention`.
    """

    mask_kinds = MASK_KINDS

    def prepare(
        self,
        queries: Sequence[range],
        keys: Sequence[range],
        documents: Documents,
        window: int | None,
        device: torch.device,  # noqa: ARG002
        *,
        mask: MaskKind = "causal",
    ) -> list[tuple[slice, slice, Block]]:
        """Divide the attention into blocks; return the blocks in which, by position, a query may attend to a key."""
        found = []
        numbers, groups = documents_and_blocks(documents)
        for rows, run in _places(queries):
            for columns, other in _places(keys):
                of, of_groups = (
                    None if one is None else (one[:, run.start : run.stop], one[:, other.start : other.stop])
                    for one in (numbers, groups)
                )
                block = Block(run.start, other.start, of, window, mask, of_groups)
                if block.is_seen(len(run), len(other)):
                    found.append((rows, columns, block))
        return found

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        """Compute attention in a block, see :func:`attend`."""
        return attend(query, key, value, block)

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, total: Tensor, block: Block
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the gradients of a block, see :func:`attend_backward`."""
        return attend_backward(grad, query, key, value, out, total, block)


def attend(query: Tensor, key: Tensor, value: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """Compute attention within one block.

    Args:
        query: [B, Q, N, D].
        key: [B, T, K, D].
        value: [B, T, K, D].
        block: positions and documents, for the mask.

    Returns:
        Output [B, Q, N, D], and log-sum-exp [B, Q, N] of each query's unmasked scores, minus infinity for a query
        without unmasked scores; both float32 or wider.
    """
    wide_key, wide_value = _wide(key), _wide(value)
    outs, sums = [], []
    for rows in _tiles(query, key):
        scores = _scores(query[:, rows], wide_key, block.mask(rows, key.shape[1], query.device))  # [B, K, G, Q, T]
        total = scores.logsumexp(dim=-1)
        probabilities = (scores - _finite(total).unsqueeze(-1)).exp()
        outs.append(torch.einsum("bkgqt,btkd->bqkgd", probabilities, wide_value).flatten(2, 3))
        sums.append(total.permute(0, 3, 1, 2).flatten(2))
    return torch.cat(outs, dim=1), torch.cat(sums, dim=1)


def attend_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, total: Tensor, block: Block
) -> tuple[Tensor, Tensor, Tensor]:
    """Backward of one block: its contributions to the gradients of queries, keys and values.

    Args:
        grad: gradient of the output of these queries' attention to all keys, [B, Q, N, D].
        query: [B, Q, N, D].
        key: [B, T, K, D].
        value: [B, T, K, D].
        out: output of these queries' attention to all keys, not only the block's, [B, Q, N, D].
        total: log-sum-exp of each query's scores for all keys, not only the block's, [B, Q, N].
        block: positions and documents, for the mask.

    Returns:
        Gradients of query, key and value, float32 or wider.
    """
    wide_key, wide_value = _wide(key), _wide(value)
    of_key, of_value = torch.zeros_like(wide_key), torch.zeros_like(wide_value)
    of_query = []
    groups = query.shape[2] // key.shape[2]
    delta = (grad.to(total.dtype) * out.to(total.dtype)).sum(dim=-1)
    for rows in _tiles(query, key):
        scores = _scores(query[:, rows], wide_key, block.mask(rows, key.shape[1], query.device))
        total_here, delta_here = (_by_head(of[:, rows], groups) for of in (total, delta))  # [B, K, G, Q]
        probabilities = (scores - _finite(total_here).unsqueeze(-1)).exp()
        of_out, asked = (_by_group(of[:, rows], groups) for of in (grad, query))  # [B, Q, K, G, D]
        of_value += torch.einsum("bkgqt,bqkgd->btkd", probabilities, of_out)
        of_scores = torch.einsum("bqkgd,btkd->bkgqt", of_out, wide_value) - delta_here.unsqueeze(-1)
        of_scores *= probabilities / math.sqrt(query.shape[3])
        of_query.append(torch.einsum("bkgqt,btkd->bqkgd", of_scores, wide_key).flatten(2, 3))
        of_key += torch.einsum("bkgqt,bqkgd->btkd", of_scores, asked)
    return torch.cat(of_query, dim=1), of_key, of_value


def merge_into(out: Tensor, total: Tensor, other: Tensor, of_other: Tensor) -> None:
    """Merge the attention of the same queries to two disjoint sets of keys; ``out`` and ``total`` change in place.

    Args:
        out: output for the first keys, [B, Q, N, D], float32 or wider.
        total: log-sum-exp for the first keys, [B, Q, N], same dtype; minus infinity for a query without keys.
        other: output for the other keys, [B, Q, N, D], in any dtype.
        of_other: log-sum-exp for the other keys, [B, Q, N], minus infinity for a query without keys.
    """
    both = torch.logaddexp(total, of_other)
    mine, theirs = ((of - _finite(both)).exp().unsqueeze(-1) for of in (total, of_other))
    out.mul_(mine).addcmul_(other, theirs)
    total.copy_(both)


def _places(runs: Sequence[range]) -> Iterator[tuple[slice, range]]:
    """Yield for each range of positions its slice in the concatenation of all ranges, and the range."""
    start = 0
    for run in runs:
        yield slice(start, start + len(run)), run
        start += len(run)


def _tiles(query: Tensor, key: Tensor) -> Iterator[slice]:
    queries = query.shape[1]
    size = max(1, min(queries, TILE // max(1, query.shape[0] * query.shape[2] * key.shape[1])))
    for start in range(0, queries, size):
        yield slice(start, min(start + size, queries))


def _scores(query: Tensor, wide_key: Tensor, mask: Tensor | None) -> Tensor:
    """Scaled attention scores [B, K, G, Q, T], minus infinity where masked."""
    asked = _by_group(query, query.shape[2] // wide_key.shape[2])
    scores = torch.einsum("bqkgd,btkd->bkgqt", asked, wide_key) / math.sqrt(query.shape[3])
    return scores if mask is None else scores.masked_fill_(~mask[:, None, None], -math.inf)


def _by_group(heads: Tensor, groups: int) -> Tensor:
    """Reshape [B, Q, N, D] to [B, Q, K, G, D], as float32 or wider."""
    return _wide(heads).reshape(*heads.shape[:2], -1, groups, heads.shape[3])


def _by_head(rows: Tensor, groups: int) -> Tensor:
    """Reshape [B, Q, N] to [B, K, G, Q]."""
    return rows.reshape(*rows.shape[:2], -1, groups).permute(0, 2, 3, 1)


def _finite(total: Tensor) -> Tensor:
    """Replace minus infinity by zero, so that a query without keys has probabilities of zero."""
    return total.masked_fill(total == -math.inf, 0)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
