"""Encoder of queries with relevant documents and irrelevant documents (negatives)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from d9d_core.errors import DataError

from d9d_data.corpus.encoder import Dropped, Encoded, Sample, encode_samples
from d9d_data.corpus.fit import Limit, Policy
from d9d_data.sources.document import Piece
from d9d_data.sources.place import Record, Reject
from d9d_data.sources.records import field_of, value_of
from d9d_data.tokenizer.base import TextTokenizer

#: Usual names of the field with negatives; used unless a config names a field.
_NEGATIVES = ("negative", "negatives")


class PairsEncoder:
    """Encoder of pairs: a query, a relevant document and n negatives, each followed by the end-of-text token.

    Args:
        tokenizer: tokenizer of the texts.
        query: field of the query.
        positive: field of the relevant document.
        negative: field of an irrelevant document, or of a list of them; ``None`` for the usual names.
        negatives: number of negatives, n, the same for all records.
        query_prefix: text before each query.
        document_prefix: text before each document.
        longest: maximum number of tokens of a text, including its end-of-text token, which truncation keeps.
        too_long: treatment of longer texts.
    """

    columns: Mapping[str, npt.DTypeLike] = {}

    def __init__(
        self,
        tokenizer: TextTokenizer,
        query: str,
        positive: str,
        negative: str | None,
        negatives: int,
        query_prefix: str,
        document_prefix: str,
        longest: int,
        too_long: Policy,
    ) -> None:
        self.vocab_size = tokenizer.vocab_size
        self._tokenizer = tokenizer
        self._query, self._positive, self._negative, self._negatives = query, positive, negative, negatives
        self._prefixes = (query_prefix, *[document_prefix] * (1 + negatives))
        self._limit = Limit(longest, too_long)

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
        """Encode records; reject records with missing texts, equal texts, or another number of negatives."""
        return encode_samples(pieces, reject, self._sample)

    def _sample(self, record: Record) -> Sample | Dropped:
        texts = {self._query: value_of(record, self._query), self._positive: value_of(record, self._positive)}
        if self._negatives:
            texts |= self._negatives_of(record)
        for name, text in texts.items():
            if not isinstance(text, str) or not text.strip():
                has = ", ".join(str(field)[:40] for field in list(record.values)[:20]) or "none"
                raise DataError(
                    f"{record.place} has no text in {name} (it has {has}); write records such as "
                    '{"query": "...", "positive": "..."}, or name the fields in the job file'
                )
        if texts[self._query] == texts[self._positive]:
            raise DataError(
                f"{record.place}: query and positive are equal, so there is nothing to learn; leave the record out"
            )
        prefixed = [a + b for a, b in zip(self._prefixes, texts.values(), strict=True)]
        whole = [self._tokenizer.ended(one) for one in self._tokenizer.encode(prefixed)]
        ids, lost = [], []
        for name, one in zip(texts, whole, strict=True):
            kept = self._limit.kept(len(one), f"{record.place}: {name}")
            if kept is None:
                return Dropped(max(map(len, whole)))
            lost.append(len(one) - (kept.stop - kept.start))
            # The end-of-text token stays: at a cut end, it replaces the last token that would be kept.
            ids.append(np.append(one[kept.start : kept.stop - 1], one[-1]))
        return Sample(ids, {}, lost, spelling=self._tokenizer.spelled(prefixed))

    def _negatives_of(self, record: Record) -> dict[str, Any]:
        """Texts of the negatives of a record, by the names that error messages use."""
        choices = _NEGATIVES if self._negative is None else (self._negative,)
        field = field_of(record, choices)
        found = value_of(record, field)
        if not isinstance(found, list):
            found = [] if found is None else [found]
        if len(found) != self._negatives:
            raise DataError(
                f"{record.place} has {len(found)} negatives in {field}, but data.negatives is {self._negatives}; give "
                "each record that many"
            )
        return {f"{field}[{number}]": text for number, text in enumerate(found)}
