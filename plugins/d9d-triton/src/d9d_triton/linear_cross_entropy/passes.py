"""Passes over logits: the statistics of each row, and the gradient in the place of the logits.

Logits are those of all words, or of a chunk of them.

Shapes: C rows, V words, P columns of a row in memory: V, and maybe some that nobody reads.
"""

from __future__ import annotations

import triton
from torch import Tensor

from d9d_triton.kernels.linear_cross_entropy import count_above, differentiate, include_words, take_statistics
from d9d_triton.launch import on_device

#: Columns in memory are a multiple of this, so that every row begins where wide loads may, whatever V is.
_COLUMNS = 16
#: Logits that a program handles at once.
_BLOCK = 8192
#: Options of the compiler. Triton's default for the fusion of multiplications and additions depends on its version.
_OPTIONS = {"num_warps": 8, "enable_fp_fusion": True}
#: The same where rows are chunks, of which a large block would hold little but what is behind the last word.
_CHUNK_BLOCK = 4096
#: Largest logit of no words: finite, also times log2(e), because minus infinity less itself is no number.
LOWEST = -2e38
#: Blocks of a row whose gradient one program computes, one after the other.
_BLOCKS = 4


def columns(words: int) -> int:
    """P for V words."""
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
    """Pass over logits, once: loss of each row, statistics for its gradient, and maybe the rank of its target.

    Args:
        logits: [C, P].
        own: logit of the target, [C].
        targets: int64 [C].
        losses: receives the loss, float32 [C]; zero where the target is ``ignored``.
        statistics: receives the largest logit of each row and the sum of ``exp(logit - largest)``, float32 [2, C].
        ranks: receives how many logits are not at most ``own``, int64 [C]; -1 where the target is ``ignored``.
        words: V.
        ignored: target of rows that are left out.
    """
    with on_device(logits):
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
    """Pass over a chunk of words: include it in the statistics of :func:`row_statistics`. Reads logits once.

    Args:
        logits: [C, P].
        targets: int64 [C], of the whole vocabulary.
        own: receives the logit of the target, float32 [C], where the chunk has it.
        statistics: float32 [2, C] of the words so far; :data:`LOWEST` and 0 before the first chunk. 0 and 1 where the
            target is ``ignored``.
        first: first word of the chunk.
        words: V.
        ignored: target of rows that are left out.
    """
    with on_device(logits):
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
    """Pass over a chunk of words: count it in the ranks of :func:`row_statistics`. Reads logits once.

    Args:
        logits: [C, P].
        targets: int64 [C].
        own: logit of the target, float32 [C].
        ranks: int64 [C], 0 before the first chunk; -1 where the target is ``ignored``.
        words: V.
        ignored: target of rows that are left out.
    """
    with on_device(logits):
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
    """Pass that overwrites logits with ``(softmax(logits) - onehot(target)) * grad_loss``. Reads and writes them once.

    Args:
        logits: [C, P].
        targets: int64 [C]; rows whose target is ``ignored`` become zeros, whatever is in them.
        statistics: float32 [2, C] of :func:`row_statistics`.
        grad_losses: gradient of the loss of each row, float32 [C].
        words: V.
        ignored: target of rows that are left out.
        first: first word, if the logits are a chunk's.
    """
    block = _block(words, _BLOCK if first is None else _CHUNK_BLOCK)
    blocks = min(_BLOCKS, triton.cdiv(words, block))
    sections = triton.cdiv(words, block * blocks)
    with on_device(logits):
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
    block: int = triton.next_power_of_2(words)
    return min(most, max(_COLUMNS, block))
