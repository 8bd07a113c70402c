"""Packing: samples cut from the concatenated tokens of all documents.

Shapes: B samples, S positions, N tokens, D documents.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

#: Target that the loss ignores.
NO_TARGET = -100

Int64 = npt.NDArray[np.int64]


def sample_count(tokens: int, sequence_length: int) -> int:
    """Number of samples of ``sequence_length`` positions in a sequence of tokens; the last needs a token after it."""
    return max(0, tokens - 1) // sequence_length


def pack(
    tokens: npt.NDArray[np.integer[Any]],
    starts: Int64,
    samples: Int64,
    sequence_length: int,
    weights: npt.NDArray[np.bool_] | None = None,
    scales: npt.NDArray[np.float32] | None = None,
) -> Mapping[str, npt.NDArray[Any]]:
    """Make a microbatch of packed samples: sample i is ``tokens[i * S : (i + 1) * S + 1]``, across documents.

    Args:
        tokens: token ids [N] of all documents, concatenated.
        starts: [D + 1], index of each document's first token, then N.
        samples: indices [B] of the samples.
        sequence_length: S.
        weights: [N], whether each token is learned; ``None`` if all tokens are learned.
        scales: [N], loss weight of each learned token; ``None`` if all weights are equal.

    Returns:
        ``tokens`` [B, S]; ``targets`` [B, S], the next token, or -100 if the next token starts another document or is
        not learned; ``positions`` [B, S], counted from the start of the document, or from the start of the sample if
        the document starts before the sample; ``documents`` [B, S], numbered from 0 in each sample. With scales also
        ``weights`` float32 [B, S], the loss weight of each target, 0 where there is no target.
    """
    first = samples[:, None] * sequence_length  # [B, 1]
    places = first + np.arange(sequence_length + 1)  # [B, S + 1]
    window = np.asarray(tokens[places], dtype=np.int64)  # [B, S + 1]
    document = np.searchsorted(starts, places, side="right") - 1  # [B, S + 1]
    here, following = document[:, :-1], document[:, 1:]  # [B, S]
    learned = here == following
    if weights is not None:
        learned &= weights[places[:, 1:]]
    weighted = {} if scales is None else {"weights": np.where(learned, scales[places[:, 1:]], np.float32(0))}
    return weighted | {
        "tokens": np.ascontiguousarray(window[:, :-1]),
        "targets": np.where(learned, window[:, 1:], NO_TARGET),
        "positions": places[:, :-1] - np.maximum(starts[here], first),
        "documents": here - here[:, :1],
    }
