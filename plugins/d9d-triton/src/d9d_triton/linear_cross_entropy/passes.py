"""Passes over logits: one computes the softmax statistics of each row, one overwrites the logits by their gradient.

The logits cover the whole vocabulary or a chunk of it.

Shapes: C rows, V vocabulary size, P columns of a row in memory: V, and possibly padding.
"""

from __future__ import annotations

from torch import Tensor

from d9d_triton.kernels.linear_cross_entropy import count_above, differentiate, include_words, take_statistics
from d9d_triton.launch import cdiv, next_power_of_2

#: Divisor of P, so that every row is aligned for vectorized loads, whatever V is.
_COLUMNS = 16
#: Number of logits that a program handles in one iteration.
_BLOCK = 8192
#: Compiler options: fused multiply-add is set, because Triton's default depends on its version.
_OPTIONS = {"num_warps": 8, "enable_fp_fusion": True}
#: Block size for chunks of the vocabulary, where a larger block would consist mostly of padding.
_CHUNK_BLOCK = 4096
#: Initial value of a maximum: finite, even after multiplication by log2(e), because -inf - (-inf) would be NaN.
LOWEST = -2e38
#: Number of blocks of a row whose gradient one program computes, one after the other.
_BLOCKS = 4


def columns(words: int) -> int:
    """Number of columns P of a row of logits in memory: ``words`` (V) rounded up to a multiple of 16, for alignment."""
    return (words + _COLUMNS - 1) // _COLUMNS * _COLUMNS


def row_statistics(
    logits: Tensor,
    own: Tensor,
    targets: Tensor,
    losses: Tensor,
    statistics: Tensor,
    ranks: Tensor | None,
    *,
    words: int,
    ignored: int,
) -> None:
    """One pass over the logits: loss of each row, statistics for its gradient, and optionally the rank of its target.

    Args:
        logits: [C, P].
        own: logit of the target, [C].
        targets: int64 [C].
        losses: receives the loss, float32 [C]; zero where the target is ``ignored``.
        statistics: receives the largest logit of each row and the sum of ``exp(logit - largest)``, float32 [2, C].
        ranks: receives the number of logits greater than ``own`` (NaN included), int64 [C]; -1 for ``ignored``.
        words: V, number of vocabulary entries.
        ignored: target index of rows that are left out.
    """
    take_statistics[(len(logits),)](
        logits,
        own,
        targets,
        losses,
        statistics[0],
        statistics[1],
        targets if ranks is None else ranks,
        ignored,
        RANKED=ranks is not None,
        WORDS=words,
        STRIDE=logits.stride(0),
        BLOCK=_block(words),
        **_OPTIONS,
    )


def include_chunk(
    logits: Tensor,
    targets: Tensor,
    own: Tensor,
    statistics: Tensor,
    *,
    first: int,
    words: int,
    ignored: int,
) -> None:
    """Add a chunk of the vocabulary to the statistics of :func:`row_statistics`; reads the logits once.

    Args:
        logits: [C, P].
        targets: int64 [C], indices into the whole vocabulary.
        own: receives the logit of the target, float32 [C], if the target is in this chunk.
        statistics: float32 [2, C] of the chunks so far; :data:`LOWEST` and 0 before the first chunk. 0 and 1 where the
            target is ``ignored``.
        first: vocabulary index of the chunk's first logit.
        words: V, number of vocabulary entries.
        ignored: target index of rows that are left out.
    """
    include_words[(len(logits),)](
        logits,
        targets,
        own,
        statistics[0],
        statistics[1],
        first,
        ignored,
        WORDS=words,
        STRIDE=logits.stride(0),
        BLOCK=_block(words, _CHUNK_BLOCK),
        **_OPTIONS,
    )


def count_chunk(logits: Tensor, targets: Tensor, own: Tensor, ranks: Tensor, *, words: int, ignored: int) -> None:
    """Add a chunk of the vocabulary to the ranks of :func:`row_statistics`; reads the logits once.

    Args:
        logits: [C, P].
        targets: int64 [C].
        own: logit of the target, float32 [C].
        ranks: int64 [C], 0 before the first chunk; -1 where the target is ``ignored``.
        words: V, number of vocabulary entries.
        ignored: target index of rows that are left out.
    """
    count_above[(len(logits),)](
        logits,
        targets,
        own,
        ranks,
        ignored,
        WORDS=words,
        STRIDE=logits.stride(0),
        BLOCK=_block(words, _CHUNK_BLOCK),
        **_OPTIONS,
    )


def gradient_in_place(
    logits: Tensor,
    targets: Tensor,
    statistics: Tensor,
    grad_losses: Tensor,
    *,
    words: int,
    ignored: int,
    first: int | None = None,
) -> None:
    """Overwrite logits with ``(softmax(logits) - onehot(target)) * grad_loss``; reads and writes them once.

    Args:
        logits: [C, P].
        targets: int64 [C]; rows whose target is ``ignored`` become zeros, even if they contain NaN.
        statistics: float32 [2, C] of :func:`row_statistics`.
        grad_losses: gradient of the loss of each row, float32 [C].
        words: V, number of vocabulary entries.
        ignored: target index of rows that are left out.
        first: vocabulary index of the first logit, if the logits are a chunk of the vocabulary.
    """
    block = _block(words, _BLOCK if first is None else _CHUNK_BLOCK)
    blocks = min(_BLOCKS, cdiv(words, block))
    sections = cdiv(words, block * blocks)
    differentiate[(len(logits) * sections,)](
        logits,
        targets,
        statistics[0],
        statistics[1],
        grad_losses,
        sections,
        first or 0,
        ignored,
        WORDS=words,
        STRIDE=logits.stride(0),
        BLOCK=block,
        BLOCKS=blocks,
        **_OPTIONS,
    )


def _block(words: int, most: int = _BLOCK) -> int:
    block: int = next_power_of_2(words)
    return min(most, max(_COLUMNS, block))
