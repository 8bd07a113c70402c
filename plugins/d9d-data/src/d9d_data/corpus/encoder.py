"""Encoders: token ids of the records in parts of a corpus, and which of the tokens are learned."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from d9d_data.sources.document import Piece, texts_of
from d9d_data.sources.place import Reject
from d9d_data.tokenizer.base import Ids, TextTokenizer

# Characters encoded in one call: enough to keep all cores busy, little enough to show progress.
_BATCH_CHARACTERS = 2_000_000


@dataclass(frozen=True, slots=True)
class Encoded:
    """Some consecutive samples.

    Attributes:
        ids: token ids of each, [tokens].
        weights: whether each token is learned, bool [tokens]; ``None`` if all are.
        characters: about how much was read for them.
        dropped: records before or among them that gave no sample, although nothing is wrong with them.
    """

    ids: Sequence[Ids]
    weights: Sequence[npt.NDArray[np.bool_]] | None
    characters: int
    dropped: int = 0


class Encoder(Protocol):
    """Encoder of the records of a corpus.

    Attributes:
        vocab_size: one more than the largest id.
        weighted: whether some tokens are not learned.
    """

    vocab_size: int
    weighted: bool

    def encode(self, pieces: Iterable[Piece], reject: Reject) -> Iterator[Encoded]:
        """Encode the records of parts of a corpus, in order.

        Args:
            pieces: the parts.
            reject: told of malformed records.

        Raises:
            DataError: a file cannot be read.
        """
        ...


class TextEncoder:
    """Encoder of texts, each followed by the end-of-text token; all tokens are learned."""

    weighted = False

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.vocab_size = tokenizer.vocab_size
        self._tokenizer = tokenizer

    def encode(self, pieces: Iterable[Piece], reject: Reject) -> Iterator[Encoded]:
        """Encode texts that are not empty."""
        end: npt.NDArray[Any] = np.asarray([self._tokenizer.end_of_text_id])
        texts = (text for piece in pieces for text in texts_of(piece, reject))
        for batch in _batches(text for text in texts if text.strip()):
            ids = [np.concatenate([ids, end]) for ids in self._tokenizer.encode(batch)]
            yield Encoded(ids, None, sum(map(len, batch)))


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
