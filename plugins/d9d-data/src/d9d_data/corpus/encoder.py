"""Encoders: token ids of the records in parts of a corpus, and values beside them, such as which are learned."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import numpy.typing as npt
from d9d_core.errors import DataError

from d9d_data.corpus.fit import Limit, Tally, TooLongError
from d9d_data.sources.document import Piece, texts_of
from d9d_data.sources.place import Record, Reject, refuse
from d9d_data.sources.records import read_records
from d9d_data.tokenizer.base import Ids, TextTokenizer

# Characters encoded in one call: enough to keep all cores busy, little enough to show progress.
_BATCH_CHARACTERS = 2_000_000
# Records whose samples are written together.
_BATCH_SAMPLES = 256


@dataclass(frozen=True, slots=True)
class Sample:
    """Sample that an encoder made of a record: one document, or several that belong together.

    Attributes:
        ids: token ids of each document, [tokens].
        columns: values beside the tokens by the names of the encoder's columns, for each document [tokens].
        lost: tokens that each document lost to a cut.
        incomplete: whether tokens to learn are among these.
        spelling: special token that a text of the record spells, if one does.
        parsed: whether tool arguments of the record are JSON strings.
        stop: special token that is the last learned one, if the last learned one is special.
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
    """Record that is left out although nothing is wrong with it: it is too long, or nothing of it is left to learn.

    Attributes:
        longest: tokens of its longest text.
        needed: fewest tokens in which it has one to learn; 0 if it has none.
    """

    longest: int
    needed: int = 0


@dataclass(frozen=True, slots=True)
class Encoded:
    """Some consecutive documents.

    Attributes:
        ids: token ids of each, [tokens].
        columns: values beside the tokens by the names of the encoder's columns, for each document [tokens].
        characters: about how much was read for them.
        tally: counts of the records before and among them that are not counted yet.
        lost: tokens that each document lost to a cut; empty if none lost any.
        labels: labels met so far in these parts of the corpus, by the numbers in the column ``labels``.
    """

    ids: Sequence[Ids]
    columns: Mapping[str, Sequence[npt.NDArray[Any]]]
    characters: int
    tally: Tally
    lost: Sequence[int] = ()
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
    """Encoder of texts, each followed by the end-of-text token; all tokens are learned.

    Args:
        tokenizer: makes the ids.
        limit: on the tokens of a text; ``None`` if the reader of the tokens takes as many as it needs.
    """

    columns: Mapping[str, npt.DTypeLike] = {}

    def __init__(self, tokenizer: TextTokenizer, limit: Limit | None = None) -> None:
        self.vocab_size = tokenizer.vocab_size
        self._tokenizer = tokenizer
        self._limit = limit

    @classmethod
    def load(cls, tokenizer: TextTokenizer, file: Path | None, settings: dict[str, Any]) -> Self:  # noqa: ARG003
        """Make an encoder; ``longest`` and ``too_long`` are settings if it has a limit."""
        return cls(tokenizer, Limit(**settings) if settings else None)

    def encode(self, pieces: Iterable[Piece], reject: Reject) -> Iterator[Encoded]:
        """Encode texts that are not empty."""
        texts = ((text, piece.file.name) for piece in pieces for text in texts_of(piece, reject))
        for batch in _batches((text, name) for text, name in texts if text.strip()):
            whole = [self._tokenizer.ended(ids) for ids in self._tokenizer.encode([text for text, _ in batch])]
            yield self._fitted(whole, batch)

    def _fitted(self, whole: Sequence[Ids], batch: Sequence[tuple[str, str]]) -> Encoded:
        """Documents as the limit lets them be."""
        characters = sum(len(text) for text, _ in batch)
        spelled = [found for text, _ in batch if (found := self._tokenizer.spelled([text]))]
        spelling = spelled[0] if spelled else ""
        tally = Tally(records=len(whole), longest=max(map(len, whole)), spelled=len(spelled), spelling=spelling)
        if self._limit is None or tally.longest <= self._limit.longest:
            return Encoded(whole, {}, characters, tally)
        kept: list[Ids] = []
        for ids, (text, name) in zip(whole, batch, strict=True):
            where = f"data.sources: {name}: the document that begins with {text.strip()[:40]!r}"
            part = self._limit.kept(len(ids), where)
            if part is not None:
                kept.append(ids[part])
        lost = [len(ids) - self._limit.longest for ids in whole if len(ids) > self._limit.longest]
        if self._limit.too_long == "drop":
            return Encoded(kept, {}, characters, tally + Tally(dropped=len(lost)))
        cut = [max(0, len(ids) - self._limit.longest) for ids in whole]
        return Encoded(kept, {}, characters, tally + Tally(cut=len(lost)), cut)


def encode_samples(
    pieces: Iterable[Piece], reject: Reject, encode: Callable[[Record], Sample | Dropped]
) -> Iterator[Encoded]:
    """Encode the records of structured files, in order.

    Args:
        pieces: the parts of the files.
        reject: told of malformed records.
        encode: makes a sample of a record, or says that it is left out although nothing is wrong with it; raises a
            DataError that begins with the record's place for one that is malformed.
    """
    samples: list[Sample] = []
    tally = Tally()
    for piece in pieces:
        for record in read_records(piece.file, piece.begin, piece.end, reject=reject):
            try:
                sample = encode(record)
            except DataError as error:
                told = refuse if isinstance(error, TooLongError) else reject
                told(record.place, str(error).removeprefix(str(record.place)).lstrip(": "))
                continue
            tally += _tallied(sample)
            if isinstance(sample, Sample):
                samples.append(sample)
            if len(samples) == _BATCH_SAMPLES:
                yield _joined(samples, tally)
                samples, tally = [], Tally()
    if tally.records:
        yield _joined(samples, tally)


def _tallied(sample: Sample | Dropped) -> Tally:
    """Counts of one record."""
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


def _joined(samples: Sequence[Sample], tally: Tally) -> Encoded:
    ids = [one for sample in samples for one in sample.ids]
    names = samples[0].columns if samples else ()
    columns = {name: [values for sample in samples for values in sample.columns[name]] for name in names}
    lost = [tokens for sample in samples for tokens in sample.lost]
    return Encoded(ids, columns, 4 * sum(map(len, ids)), tally, lost)


def _batches(texts: Iterable[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    batch: list[tuple[str, str]] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text[0])
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
