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
    """Make a microbatch of padded documents: sample i is document i, truncated to ``sequence_length`` positions.

    The last token of a document is a target only, so a document of n tokens has n - 1 positions; a document of one
    token has one position without a target. S is the largest number of positions of these samples, rounded
    up to a multiple of ``multiple``. The padding is a separate document at the end of a sample: no token of the sample
    attends to it, and its own attention is well defined.

    Args:
        tokens: token ids [N] of all documents, concatenated.
        starts: [D + 1], index of each document's first token, then N.
        samples: indices [B] of the documents.
        sequence_length: maximum number of positions of a sample; a multiple of ``multiple``.
        multiple: divisor of S.
        weights: [N], whether each token is learned; ``None`` if all tokens are learned.
        scales: [N], loss weight of each learned token; ``None`` if all weights are equal.

    Returns:
        ``tokens`` [B, S], padded with the last of all tokens; ``targets`` [B, S], the next token, or -100 in padding
        and where the next token is not learned; ``positions`` [B, S], counted from the start of the sample, and again
        from the start of the padding; ``documents`` [B, S], 0, and 1 in padding; ``lengths`` [B], number of positions
        before the padding. With scales also ``weights`` float32 [B, S], the loss weight of each target, 0 without a
        target.
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
    """Make a microbatch of padded documents whose tokens are not predicted: a document of n tokens has n positions.

    Args:
        tokens: token ids [N] of all documents.
        starts: [D + 1], index of each document's first token, then N.
        samples: indices [B] of the documents.
        sequence_length: maximum number of positions of a sample; a multiple of ``multiple``.
        multiple: divisor of S.
        labels: [N], class of each token or -100; ``None`` without labels.
        ends: rules for the last tokens of documents.
        label_each: whether each token has a label; otherwise the label of the first token is the label of the sample.

    Returns:
        ``tokens``, ``positions`` and ``documents`` [B, S] and ``lengths`` [B] as :func:`pad` returns them. With
        ``labels`` also ``labels``: [B, S] with -100 in padding, or [B].
    """
    first, available = starts[samples], starts[samples + 1] - starts[samples] - ends.no_inputs  # [B], [B]
    lengths, columns, inside = _rectangle(available, sequence_length, multiple)
    cut = np.maximum(available - sequence_length, 0)  # [B]
    if ends.from_end:
        first = first + cut
    places = np.where(inside, first[:, None] + columns, len(tokens) - 1)
    if ends.keep and not ends.from_end:
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
    """Lengths [B, 1] of samples, column indices [S] up to the padded length, and a mask [B, S] of the samples."""
    lengths = np.clip(positions, 1, sequence_length)[:, None]
    columns = np.arange(-(-int(lengths.max()) // multiple) * multiple)
    return lengths, columns, columns < lengths
