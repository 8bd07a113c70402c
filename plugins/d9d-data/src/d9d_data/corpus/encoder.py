"""Encoders, which turn records of a corpus into token ids and columns of values per token, such as loss weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import numpy.typing as npt
from d9d_core.errors import DataError

from d9d_data.corpus.fit import Limit, Tally, TooLongError
from d9d_data.sources.document import Piece, texts_of
from d9d_data.sources.place import Numbering, Record, Reject, refuse
from d9d_data.sources.records import read_records
from d9d_data.tokenizer.base import Ids, TextTokenizer

# Characters encoded in one call: enough to use all cores, few enough to show progress.
_BATCH_CHARACTERS = 2_000_000
# Number of records whose samples are written together.
_BATCH_SAMPLES = 256


@dataclass(frozen=True, slots=True)
class Sample:
    """Encoded record: one document, or several documents of one sample.

    Attributes:
        ids: token ids of each document, [tokens].
        columns: values per token, by the names of the encoder's columns; for each document [tokens].
        lost: number of tokens that each document lost to truncation.
        incomplete: whether tokens to learn were lost.
        spelling: special token that a text of the record spells; empty if no text spells one.
        parsed: whether tool arguments of the record are JSON strings.
        stop: last learned token if it is a special token; otherwise empty.
    """

    ids: Sequence[Ids]
    columns: Mapping[str, Sequence[npt.NDArray[Any]]]
    lost: Sequence[int]
    incomplete: bool = False
    spelling: str = ""
    parsed: bool = False
    stop: str = ""


@dataclass(frozen=True, slots=True)
class Dropped:
    """Well-formed record that is left out: it is too long, or has no token to learn after truncation.

    Attributes:
        longest: number of tokens of the record's longest text.
        needed: number of leading tokens up to and including the first token to learn; 0 if the record has no token to
            learn.
    """

    longest: int
    needed: int = 0


@dataclass(frozen=True, slots=True)
class Encoded:
    """Batch of consecutive encoded documents.

    Attributes:
        ids: token ids of each document, [tokens].
        columns: values per token, by the names of the encoder's columns; for each document [tokens].
        characters: approximate number of bytes read for these documents, to show progress.
        tally: counts of the records of this batch, including records left out since the last batch.
        numbers: number of each document's record among the records of this call of :meth:`Encoder.encode`, which
            include malformed and dropped records.
        lost: number of tokens that each document lost to truncation; may be empty if no document lost tokens.
        labels: labels found so far by this call of :meth:`Encoder.encode`; the column ``labels`` has their indices.
    """

    ids: Sequence[Ids]
    columns: Mapping[str, Sequence[npt.NDArray[Any]]]
    characters: int
    tally: Tally
    numbers: Sequence[int]
    lost: Sequence[int] = ()
    labels: tuple[str | int, ...] = ()


class Encoder(Protocol):
    """Encoder of the records of a corpus.

    Attributes:
        vocab_size: largest token id plus 1.
        columns: dtype of each column of values per token. ``weights``: whether the token is learned; ``labels``: an
            index into :attr:`Encoded.labels`, or -100; ``scales``: the loss weight of a learned token, stored only if
            some weight is not 1.
    """

    vocab_size: int

    @property
    def columns(self) -> Mapping[str, npt.DTypeLike]:
        """Dtype of each column of values per token, by name."""
        ...

    @classmethod
    def load(cls, tokenizer: TextTokenizer, file: Path | None, settings: dict[str, Any]) -> Self:
        """Make an encoder in a worker process, from values that can be pickled.

        Args:
            tokenizer: tokenizer of the texts.
            file: ``tokenizer.json`` of the tokenizer, if it has such a file.
            settings: settings of this encoder, as plain data.
        """
        ...

    def encode(self, pieces: Iterable[Piece], reject: Reject) -> Iterator[Encoded]:
        """Encode the records of pieces of a corpus, in order.

        Args:
            pieces: pieces to read.
            reject: called for each malformed record.

        Raises:
            DataError: a file cannot be read, or a record is too long under ``too_long: error``.
        """
        ...


class TextEncoder:
    """Encoder of texts; each document ends with the end-of-text token, and all tokens are learned.

    Args:
        tokenizer: tokenizer of the texts.
        limit: token limit of a text; ``None`` keeps every text whole.
    """

    columns: Mapping[str, npt.DTypeLike] = {}

    def __init__(self, tokenizer: TextTokenizer, limit: Limit | None = None) -> None:
        self.vocab_size = tokenizer.vocab_size
        self._tokenizer = tokenizer
        self._limit = limit

    @classmethod
    def load(cls, tokenizer: TextTokenizer, file: Path | None, settings: dict[str, Any]) -> Self:  # noqa: ARG003
        """Make an encoder; the settings ``longest`` and ``too_long`` set a limit, no settings mean no limit."""
        return cls(tokenizer, Limit(**settings) if settings else None)

    def encode(self, pieces: Iterable[Piece], reject: Reject) -> Iterator[Encoded]:
        """Encode the texts of pieces of a corpus; empty texts are left out."""
        numbering = Numbering(reject)
        texts = ((text, piece.file.name) for piece in pieces for text in texts_of(piece, numbering.reject))
        numbered = numbering.of((text, name) for text, name in texts if text.strip())
        for batch in _batches((number, text, name) for number, (text, name) in numbered):
            whole = [self._tokenizer.ended(ids) for ids in self._tokenizer.encode([text for _, text, _ in batch])]
            yield self._fitted(whole, batch)

    def _fitted(self, whole: Sequence[Ids], batch: Sequence[tuple[int, str, str]]) -> Encoded:
        """Truncate or drop the documents of a batch according to the token limit."""
        characters = sum(len(text) for _, text, _ in batch)
        numbers = [number for number, _, _ in batch]
        spelled = [found for _, text, _ in batch if (found := self._tokenizer.spelled([text]))]
        spelling = spelled[0] if spelled else ""
        tally = Tally(records=len(whole), longest=max(map(len, whole)), spelled=len(spelled), spelling=spelling)
        if self._limit is None or tally.longest <= self._limit.longest:
            return Encoded(whole, {}, characters, tally, numbers)
        kept: dict[int, Ids] = {}
        for ids, (number, text, name) in zip(whole, batch, strict=True):
            where = f"data.sources: {name}: the document that begins with {text.strip()[:40]!r}"
            part = self._limit.kept(len(ids), where)
            if part is not None:
                kept[number] = ids[part]
        lost = [len(ids) - self._limit.longest for ids in whole if len(ids) > self._limit.longest]
        if self._limit.too_long == "drop":
            return Encoded([*kept.values()], {}, characters, tally + Tally(dropped=len(lost)), [*kept])
        cut = [max(0, len(ids) - self._limit.longest) for ids in whole]
        return Encoded([*kept.values()], {}, characters, tally + Tally(cut=len(lost)), numbers, cut)


def encode_samples(
    pieces: Iterable[Piece], reject: Reject, encode: Callable[[Record], Sample | Dropped]
) -> Iterator[Encoded]:
    """Encode the records of structured files, in order.

    Args:
        pieces: pieces of the files.
        reject: called for each malformed record.
        encode: function that makes a sample of a record, or a ``Dropped`` for a well-formed record to leave out; for a
            malformed record it raises a DataError that begins with file and line of the record.

    Raises:
        DataError: a file cannot be read, or a record is too long under ``too_long: error``.
    """
    samples: dict[int, Sample] = {}
    tally, numbering = Tally(), Numbering(reject)
    for piece in pieces:
        records = read_records(piece.file, piece.begin, piece.end, reject=numbering.reject)
        for number, record in numbering.of(records):
            try:
                sample = encode(record)
            except DataError as error:
                told = refuse if isinstance(error, TooLongError) else reject
                told(record.place, str(error).removeprefix(str(record.place)).lstrip(": "))
                continue
            tally += _tallied(sample)
            if isinstance(sample, Sample):
                samples[number] = sample
            if len(samples) == _BATCH_SAMPLES:
                yield _joined(samples, tally)
                samples, tally = {}, Tally()
    if tally.records:
        yield _joined(samples, tally)


def _tallied(sample: Sample | Dropped) -> Tally:
    """Tally of a single encoded record."""
    if isinstance(sample, Dropped):
        return Tally(records=1, longest=sample.longest, dropped=1, needed=sample.needed)
    longest = max(len(ids) + lost for ids, lost in zip(sample.ids, sample.lost, strict=True))
    return Tally(
        records=1,
        longest=longest,
        cut=int(any(sample.lost)),
        incomplete=int(sample.incomplete),
        spelled=int(bool(sample.spelling)),
        spelling=sample.spelling,
        parsed=int(sample.parsed),
        stops={sample.stop: 1} if sample.stop else {},
    )


def _joined(numbered: Mapping[int, Sample], tally: Tally) -> Encoded:
    samples = [*numbered.values()]
    ids = [one for sample in samples for one in sample.ids]
    names = samples[0].columns if samples else ()
    columns = {name: [values for sample in samples for values in sample.columns[name]] for name in names}
    lost = [tokens for sample in samples for tokens in sample.lost]
    numbers = [number for number, sample in numbered.items() for _ in sample.ids]
    return Encoded(ids, columns, 4 * sum(map(len, ids)), tally, numbers, lost)


def _batches(texts: Iterable[tuple[int, str, str]]) -> Iterator[list[tuple[int, str, str]]]:
    batch: list[tuple[int, str, str]] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text[1])
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
