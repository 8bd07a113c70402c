"""Padding: microbatches of whole documents, padded to one length.

Shapes: B samples, S positions, N tokens, D documents.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from d9d_data.corpus.prepare import WHOLE, Ends
from d9d_data.stream.packing import NO_TARGET

Int64 = npt.NDArray[np.int64]


def pad(
    tokens: npt.NDArray[np.integer[Any]],
    starts: Int64,
    samples: Int64,
    sequence_length: int,
    multiple: int,
    weights: npt.NDArray[np.bool_] | None = None,
    scales: npt.NDArray[np.float32] | None = None,
) -> Mapping[str, npt.NDArray[Any]]:
    """Padding of a microbatch: sample i is document i, cut to ``sequence_length`` positions.

    The last token of a document is predicted but predicts nothing, so a document of n tokens has n - 1 positions; one
    that is nothing but its end-of-text token has one, without a target. S is the most positions of any sample here,
    rounded up to a multiple of ``multiple``. Padding follows the sample as another document: no token of the sample
    sees it, and attention over it is over something.

    Args:
        tokens: [N] all documents, each with its end-of-text token.
        starts: [D + 1] where each document starts, and N.
        samples: [B] which documents.
        sequence_length: most positions of a sample; a multiple of ``multiple``.
        multiple: divisor of S.
        weights: [N] which tokens are learned; ``None`` for all.
        scales: [N] weights of those that are learned; ``None`` if they have the same.

    Returns:
        ``tokens`` [B, S], padded with the end-of-text token; ``targets`` [B, S], the next token, -100 in padding and
        where it is not learned; ``positions`` [B, S], counted from the start of the sample, and again from the start of
        padding; ``documents`` [B, S], 0, and 1 in padding; ``lengths`` [B], positions of each sample without padding.
        With scales ``weights`` float32 [B, S], of the targets, 0 where there is none.
    """
    first, available = starts[samples], starts[samples + 1] - starts[samples]  # [B], [B]
    lengths, columns, inside = _rectangle(available - 1, sequence_length, multiple)
    followed = columns < available[:, None] - 1  # [B, S]
    end = len(tokens) - 1  # the last token of all ends a document
    places = np.where(inside, first[:, None] + columns, end)
    following = np.where(inside & followed, places + 1, end)
    learned = inside & followed if weights is None else inside & followed & weights[following]
    weighted = {} if scales is None else {"weights": np.where(learned, scales[following], np.float32(0))}
    return weighted | {
        "tokens": np.asarray(tokens[places], dtype=np.int64),
        "targets": np.where(learned, np.asarray(tokens[following], dtype=np.int64), NO_TARGET),
        "positions": np.where(inside, columns, columns - lengths),
        "documents": (~inside).astype(np.int64),
        "lengths": lengths[:, 0],
    }


def pad_texts(
    tokens: npt.NDArray[np.integer[Any]],
    starts: Int64,
    samples: Int64,
    sequence_length: int,
    multiple: int,
    labels: npt.NDArray[np.int32] | None = None,
    ends: Ends = WHOLE,
    *,
    label_each: bool = False,
) -> Mapping[str, Int64]:
    """Padding of a microbatch of documents whose tokens are not predicted: one of n tokens has n positions.

    Args:
        tokens: [N] all documents.
        starts: [D + 1] where each document starts, and N.
        samples: [B] which documents.
        sequence_length: most positions of a sample; a multiple of ``multiple``.
        multiple: divisor of S.
        labels: [N] classes, -100 for none; ``None`` if there are none.
        ends: what becomes of the ends of documents.
        label_each: whether each token has a label; otherwise that of the first is the sample's.

    Returns:
        ``tokens``, ``positions`` and ``documents`` [B, S] and ``lengths`` [B] as :func:`pad` gives them, and with
        labels ``labels``, [B, S] with -100 in padding, or [B].
    """
    first, available = starts[samples], starts[samples + 1] - starts[samples] - ends.no_inputs  # [B], [B]
    lengths, columns, inside = _rectangle(available, sequence_length, multiple)
    cut = np.maximum(available - sequence_length, 0)  # [B]
    if ends.from_end:
        first = first + cut
    places = np.where(inside, first[:, None] + columns, len(tokens) - 1)
    if ends.keep and not ends.from_end and cut.any():
        places[:, sequence_length - 1 :] += cut[:, None]
    padded = {
        "tokens": np.asarray(tokens[places], dtype=np.int64),
        "positions": np.where(inside, columns, columns - lengths),
        "documents": (~inside).astype(np.int64),
        "lengths": lengths[:, 0],
    }
    if labels is not None:
        found = np.where(inside, labels[places], NO_TARGET) if label_each else labels[first]
        padded["labels"] = np.asarray(found, dtype=np.int64)
    return padded


def _rectangle(positions: Int64, sequence_length: int, multiple: int) -> tuple[Int64, Int64, npt.NDArray[np.bool_]]:
    """Lengths [B, 1] of samples, the columns [S] that hold the longest, and which places [B, S] a sample fills."""
    lengths = np.clip(positions, 1, sequence_length)[:, None]
    columns = np.arange(-(-int(lengths.max()) // multiple) * multiple)
    return lengths, columns, columns < lengths
