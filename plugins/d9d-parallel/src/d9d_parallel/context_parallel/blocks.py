"""Op ``attention_block``: attention of some queries to some keys, with the logarithms of the sums that merge blocks.

The slot's static facts are those of the op ``attention``. A backend is an object with these methods, all of which may
leave work to the device and must not wait for it; :class:`ReferenceBlocks` is the reference:

- ``prepare(queries, keys, documents, window, device) -> [(queries, keys, mask), ...]`` cuts the block into parts.
  Positions of queries and keys are ranges in ascending order, ``documents`` int64 [B, S] of all positions or ``None``,
  ``window`` the number of positions that a query sees or ``None``. A part is a slice of the queries, one of the keys,
  and what the backend wants to know to compute it. Nothing may be seen outside of the parts.
- ``(query, key, value, mask) -> (out, total)`` attends in a part, see :func:`attend`.
- ``backward(grad, query, key, value, out, total, mask) -> gradients`` is its backward, with the output and the sums of
  the whole attention, see :func:`attend_backward`.

The reference computes in float32 or wider, tile by tile of queries; only a tile's scores exist at once, in the backward
too, which computes them again. Dao et al. 2022, "FlashAttention", sections 3.1 and B.2.

Shapes: B samples, Q queries and T keys of the block, N query heads, K key/value heads (N = K * G), D features of a
head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

#: Scores that exist at once.
TILE = 2**26


@dataclass(frozen=True, slots=True)
class Block:
    """Block of the score matrix of context-parallel attention.

    Attributes:
        query, key: positions of the first query and of the first key.
        documents: int64 [B, Q] and [B, T] of queries and keys; ``None`` if a sample is one document.
        window: number of positions that a query sees, its own included; ``None`` for all.
    """

    query: int
    key: int
    documents: tuple[Tensor, Tensor] | None = None
    window: int | None = None

    def is_seen(self, queries: int, keys: int) -> bool:
        """Whether some query may see some key, as far as positions tell."""
        near = self.window is None or self.query - (self.key + keys - 1) < self.window
        return near and self.query + queries > self.key

    def mask(self, rows: slice, keys: int, device: torch.device) -> Tensor | None:
        """Mask of some queries, bool [B or 1, rows, T]; ``None`` if they see all keys."""
        first, last = self.query + rows.start, self.query + rows.stop - 1
        seen = None
        if first < self.key + keys - 1 or (self.window is not None and last - self.key >= self.window):
            places = torch.arange(self.key, self.key + keys, device=device)
            behind = torch.arange(first, last + 1, device=device)[:, None] - places
            seen = behind >= 0 if self.window is None else (behind >= 0) & (behind < self.window)
        if self.documents is not None:
            of_queries, of_keys = self.documents
            alike = of_queries[:, rows, None] == of_keys[:, None]
            return alike if seen is None else alike & seen
        return None if seen is None else seen[None]


class ReferenceBlocks:
    """Reference of context-parallel attention blocks: each run of queries with each run of keys, in plain PyTorch."""

    def prepare(
        self,
        queries: Sequence[range],
        keys: Sequence[range],
        documents: Tensor | None,
        window: int | None,
        device: torch.device,  # noqa: ARG002
    ) -> list[tuple[slice, slice, Block]]:
        """Cut into blocks in which something may be seen, as far as positions tell."""
        found = []
        for rows, run in _places(queries):
            for columns, other in _places(keys):
                of = None
                if documents is not None:
                    of = (documents[:, run.start : run.stop], documents[:, other.start : other.stop])
                block = Block(run.start, other.start, of, window)
                if block.is_seen(len(run), len(other)):
                    found.append((rows, columns, block))
        return found

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        """Attend in a block, see :func:`attend`."""
        return attend(query, key, value, block)

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, total: Tensor, block: Block
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients by a block, see :func:`attend_backward`."""
        return attend_backward(grad, query, key, value, out, total, block)


def attend(query: Tensor, key: Tensor, value: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """Context-parallel attention of one block by itself.

    Args:
        query: [B, Q, N, D].
        key: [B, T, K, D].
        value: [B, T, K, D].
        block: what is seen.

    Returns:
        Output [B, Q, N, D], and logarithm of the sum of exponentials of the seen scores [B, Q, N], minus infinity
        where there is none; float32 or wider.
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
    """Context-parallel attention, backward of one block: gradients of queries, keys and values in the larger attention.

    Args:
        grad: gradient of the larger attention's output, [B, Q, N, D].
        query: [B, Q, N, D].
        key: [B, T, K, D].
        value: [B, T, K, D].
        out: the larger attention's output, [B, Q, N, D].
        total: logarithm of the sum of exponentials of all scores of each query, [B, Q, N].
        block: what is seen.

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
    """Merge the attention of the same queries to other keys into that to some, in place.

    Args:
        out: [B, Q, N, D], float32 or wider.
        total: [B, Q, N], as wide; minus infinity of a query without keys.
        other: as ``out``, of the other keys, in any dtype.
        of_other: as ``total``.
    """
    both = torch.logaddexp(total, of_other)
    mine, theirs = ((of - _finite(both)).exp().unsqueeze(-1) for of in (total, of_other))
    out.mul_(mine).addcmul_(other, theirs)
    total.copy_(both)


def _places(runs: Sequence[range]) -> Iterator[tuple[slice, range]]:
    """Places of runs that lie one behind the other."""
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
    """Scaled scores [B, K, G, Q, T], minus infinity where nothing is seen."""
    asked = _by_group(query, query.shape[2] // wide_key.shape[2])
    scores = torch.einsum("bqkgd,btkd->bkgqt", asked, wide_key) / math.sqrt(query.shape[3])
    return scores if mask is None else scores.masked_fill_(~mask[:, None, None], -math.inf)


def _by_group(heads: Tensor, groups: int) -> Tensor:
    """[B, Q, N, D] as [B, Q, K, G, D], wide."""
    return _wide(heads).reshape(*heads.shape[:2], -1, groups, heads.shape[3])


def _by_head(rows: Tensor, groups: int) -> Tensor:
    """[B, Q, N] as [B, K, G, Q]."""
    return rows.reshape(*rows.shape[:2], -1, groups).permute(0, 2, 3, 1)


def _finite(total: Tensor) -> Tensor:
    """Zero in the place of minus infinity, so that a query without keys has probabilities of zero."""
    return total.masked_fill(total == -math.inf, 0)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
