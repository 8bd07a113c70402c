"""Encoders: token ids of the records in parts of a corpus, and values beside them, such as which are learned."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt
from d9d_core.extend import DataError

from d9d_data.sources.document import Piece, texts_of
from d9d_data.sources.place import Record, Reject
from d9d_data.sources.records import read_records
from d9d_data.tokenizer.base import Ids, TextTokenizer

# Characters encoded in one call: enough to keep all cores busy, little enough to show progress.
_BATCH_CHARACTERS = 2_000_000
# Records whose samples are written together.
_BATCH_SAMPLES = 256


@dataclass(frozen=True, slots=True)
class Sample:
    """Sample that a record became: one document, or several that belong together.

    Attributes:
        ids: token ids of each document, [tokens].
        columns: values beside the tokens by the names of the encoder's columns, for each document [tokens].
        cut: whether the record had more than fits into a sample.
    """

    ids: Sequence[Ids]
    columns: Mapping[str, Sequence[npt.NDArray[Any]]]
    cut: bool = False


@dataclass(frozen=True, slots=True)
class Encoded:
    """Some consecutive documents.

    Attributes:
        ids: token ids of each, [tokens].
        columns: values beside the tokens by the names of the encoder's columns, for each document [tokens].
        characters: about how much was read for them.
        dropped: records before or among them that gave no sample, although nothing is wrong with them.
        cut: records among them that had more than fits into a sample.
        labels: labels met so far in these parts of the corpus, by the numbers in the column ``labels``.
    """

    ids: Sequence[Ids]
    columns: Mapping[str, Sequence[npt.NDArray[Any]]]
    characters: int
    dropped: int = 0
    cut: int = 0
    labels: tuple[str | int, ...] = ()


class Encoder(Protocol):
    """Encoder of the records of a corpus.

    Attributes:
        vocab_size: one more than the largest id.
        columns: types of the values that stand beside each token, by name: ``weights``, whether it is learned;
            ``labels``, a number of :attr:`Encoded.labels` or -100; ``scales``, the weight of what is learned, which is
            kept only if one is not 1.
    """

    vocab_size: int

    @property
    def columns(self) -> Mapping[str, npt.DTypeLike]:
        """Types of the values that stand beside each token, by name."""
        ...

    @classmethod
    def load(cls, tokenizer: TextTokenizer, file: Path | None, settings: dict[str, Any]) -> Self:
        """Make an encoder from what can be sent to another process.

        Args:
            tokenizer: makes the ids.
            file: its ``tokenizer.json``, if it has one.
            settings: the encoder's own, plain data.
        """
        ...

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

    columns: Mapping[str, npt.DTypeLike] = {}

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.vocab_size = tokenizer.vocab_size
        self._tokenizer = tokenizer

    @classmethod
    def load(cls, tokenizer: TextTokenizer, file: Path | None, settings: dict[str, Any]) -> Self:  # noqa: ARG003
        """Make an encoder; it needs a tokenizer alone."""
        return cls(tokenizer)

    def encode(self, pieces: Iterable[Piece], reject: Reject) -> Iterator[Encoded]:
        """Encode texts that are not empty."""
        end: npt.NDArray[Any] = np.asarray([self._tokenizer.end_of_text_id])
        texts = (text for piece in pieces for text in texts_of(piece, reject))
        for batch in _batches(text for text in texts if text.strip()):
            ids = [np.concatenate([ids, end]) for ids in self._tokenizer.encode(batch)]
            yield Encoded(ids, {}, sum(map(len, batch)))


def encode_samples(
    pieces: Iterable[Piece], reject: Reject, encode: Callable[[Record], Sample | None]
) -> Iterator[Encoded]:
    """Encode the records of structured files, in order.

    Args:
        pieces: the parts of the files.
        reject: told of malformed records.
        encode: makes a sample of a record, or ``None`` if the record is left out although nothing is wrong with it;
            raises a DataError that begins with the record's place for one that is malformed.
    """
    samples: list[Sample] = []
    dropped = 0
    for piece in pieces:
        for record in read_records(piece.file, piece.begin, piece.end, reject=reject):
            try:
                sample = encode(record)
            except DataError as error:
                reject(record.place, str(error).removeprefix(str(record.place)).lstrip(": "))
                continue
            if sample is None:
                dropped += 1
                continue
            samples.append(sample)
            if len(samples) == _BATCH_SAMPLES:
                yield _joined(samples, dropped)
                samples, dropped = [], 0
    if samples or dropped:
        yield _joined(samples, dropped)


def _joined(samples: Sequence[Sample], dropped: int) -> Encoded:
    ids = [one for sample in samples for one in sample.ids]
    names = samples[0].columns if samples else ()
    columns = {name: [values for sample in samples for values in sample.columns[name]] for name in names}
    return Encoded(ids, columns, 4 * sum(map(len, ids)), dropped, sum(sample.cut for sample in samples))


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
