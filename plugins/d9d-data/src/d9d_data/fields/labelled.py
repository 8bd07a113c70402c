"""Encoder of labelled records: texts with one label each, or lists of words with a label for each word."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import tokenizers
from d9d_core.errors import DataError

from d9d_data.corpus.encoder import Dropped, Encoded, Sample, encode_samples
from d9d_data.corpus.fit import Limit, Policy
from d9d_data.fields.label_table import NO_LABEL, LabelTable
from d9d_data.sources.document import Piece
from d9d_data.sources.kinds import kind_of
from d9d_data.sources.place import Record, Reject
from d9d_data.sources.records import field_of, value_of
from d9d_data.tokenizer.base import TextTokenizer, panics_refused

#: Fields of word labels in published data sets; used unless a config names a field.
_OF_WORDS = ("labels", "ner_tags")


class LabelledEncoder:
    """Encoder of labelled texts or words: token ids with a column of labels.

    The token ids are the same as in transformers, including the tokenizer's special tokens. The label of a text is at
    its first token. Words are joined by spaces; the label of a word is at the first token with a character of the word.

    Args:
        tokenizer: tokenizer of the texts.
        per: ``text`` or ``word``.
        field: field of the text, or of the list of words.
        pair: field of a second text, which the tokenizer joins to the first; ``None`` for records of one text.
        label: field of the label, or of the list of labels; ``None`` for the usual names.
        names: names of the classes; ``None`` to collect them from the data.
        longest: maximum number of tokens of a sample, including the tokenizer's special tokens, which truncation keeps.
        too_long: treatment of longer samples.
    """

    columns: Mapping[str, npt.DTypeLike] = {"labels": np.int32}

    def __init__(
        self,
        tokenizer: TextTokenizer,
        per: str,
        field: str,
        pair: str | None,
        label: str | None,
        names: Sequence[str] | None,
        longest: int,
        too_long: Policy,
    ) -> None:
        self.vocab_size = tokenizer.vocab_size
        self._tokenizer = tokenizer
        self._limit = Limit(longest, too_long)
        self._whole, self._cut = (tokenizers.Tokenizer.from_str(tokenizer.serialised()) for _ in range(2))
        for backend in (self._whole, self._cut):
            backend.encode_special_tokens = not tokenizer.recognises_special_tokens
            backend.no_padding()
        self._cut.enable_truncation(longest, direction="left" if too_long == "cut_start" else "right")
        self._per, self._field, self._pair, self._label, self._names = per, field, pair, label, names

    @classmethod
    def load(cls, tokenizer: TextTokenizer, file: Path | None, settings: dict[str, Any]) -> Self:  # noqa: ARG003
        """Make an encoder in a worker process, from values that can be pickled.

        Args:
            tokenizer: tokenizer of the texts.
            file: ``tokenizer.json`` of the tokenizer, if it has such a file.
            settings: the other arguments of the class.
        """
        return cls(tokenizer, **settings)

    def encode(self, pieces: Iterable[Piece], reject: Reject) -> Iterator[Encoded]:
        """Encode records; reject records without text or with an invalid label."""
        table = LabelTable(self._names)
        sample = partial(self._of_text if self._per == "text" else self._of_words, table)
        for batch in encode_samples(pieces, reject, sample):
            yield replace(batch, labels=table.labels)

    def _of_text(self, table: LabelTable, record: Record) -> Sample | Dropped:
        where = str(record.place)
        text = self._text(record, self._field)
        pair = None if self._pair is None else self._text(record, self._pair)
        field = self._label or "label"
        if field not in record.values and value_of(record, field) is None:
            raise _without(record, "label", field)
        label = table.check(value_of(record, field), f"{where}: {field}")
        encoding, lost = self._encoded(where, text, pair)
        if encoding is None:
            return Dropped(lost)
        labels = np.full(len(encoding.ids), NO_LABEL, dtype=np.int32)
        if not len(labels):
            raise DataError(f"{where}: the tokenizer makes no token of {self._field}; leave the record out")
        labels[0] = table.id_of(label)
        spelling = self._tokenizer.spelled([text, pair or ""])
        return _sample(encoding, labels, lost, spelling)

    def _of_words(self, table: LabelTable, record: Record) -> Sample | Dropped:
        where = str(record.place)
        words = value_of(record, self._field)
        if not isinstance(words, list):
            raise _without(record, "list of words", self._field)
        for number, word in enumerate(words):
            if not isinstance(word, str) or not word.strip():
                shown = "empty" if isinstance(word, str) else kind_of(word)
                raise DataError(f"{where}: {self._field}[{number}] is {shown}; give a text")
        choices = _OF_WORDS if self._label is None else (self._label,)
        field = field_of(record, choices)
        values = value_of(record, field)
        if not isinstance(values, list):
            raise _without(record, "list of labels", field)
        if len(values) != len(words) or not words:
            raise DataError(
                f"{where} has {len(words)} words in {self._field} and {len(values)} labels in {field}; give one per "
                "word, and at least one word"
            )
        checked = [table.check(value, f"{where}: {field}[{number}]") for number, value in enumerate(values)]
        encoding, lost = self._encoded(where, " ".join(words), None)
        if encoding is None:
            return Dropped(lost)
        labels = np.full(len(encoding.ids), NO_LABEL, dtype=np.int32)
        starts = np.cumsum([0, *(len(word) + 1 for word in words)])  # start of each word, then the end of the text
        begins = (begin for begin, end in encoding.offsets if end > begin)
        word = int(np.searchsorted(starts, next(begins, 0)))  # next word without a label
        last = starts[word - 1] + len(words[word - 1]) if word else 0  # end of a word whose beginning was cut
        for token, (_, end) in enumerate(encoding.offsets):
            if word < len(words) and end > max(starts[word], last):
                labels[token] = table.id_of(checked[word])
                word = int(np.searchsorted(starts, end, side="left"))
        missing = sum(label != NO_LABEL for label in checked) - int(np.count_nonzero(labels != NO_LABEL))
        return _sample(encoding, labels, lost, self._tokenizer.spelled(words), incomplete=lost > 0 and missing > 0)

    def _encoded(self, where: str, text: str, pair: str | None) -> tuple[tokenizers.Encoding | None, int]:
        """Encoding of a text, and the number of lost tokens; for a dropped text, ``None`` and its number of tokens.

        Raises:
            TooLongError: the text is too long, and ``too_long`` is ``error``.
        """
        with panics_refused(text, pair):
            encoding = self._whole.encode(text, pair)
        count = len(encoding.ids)
        if self._limit.kept(count, where) is None:
            return None, count
        if count <= self._limit.longest:
            return encoding, 0
        # In a pair, the longer text is truncated; special tokens stay.
        with panics_refused():
            cut = self._cut.encode(text, pair)
        return cut, count - len(cut.ids)

    def _text(self, record: Record, field: str) -> str:
        text = value_of(record, field)
        if not isinstance(text, str) or not text.strip():
            raise _without(record, "text", field)
        return text


def _sample(
    encoding: tokenizers.Encoding, labels: npt.NDArray[np.int32], lost: int, spelling: str, incomplete: bool = False
) -> Sample:
    ids = np.asarray(encoding.ids, dtype=np.int64)
    return Sample([ids], {"labels": [labels]}, [lost], incomplete, spelling)


def _without(record: Record, what: str, field: str) -> DataError:
    """Make the error about a record whose field is missing or of the wrong type."""
    has = ", ".join(str(name)[:40] for name in list(record.values)[:20]) or "none"
    found = value_of(record, field)
    there = f"; it is {kind_of(found)} there" if found is not None and not isinstance(found, str) else ""
    return DataError(
        f"{record.place} has no {what} in a field {field!r} (it has {has}){there}; name another field in the job file, "
        "or leave such records out with 'data.malformed: skip'"
    )
