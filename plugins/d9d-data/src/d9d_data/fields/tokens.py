"""Encoder of records that are tokenised already: token ids, and labels or a mask of the tokens to learn."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from d9d_core.errors import DataError

from d9d_data.chat.encode import ChatTokenizer, is_trainable
from d9d_data.corpus.encoder import Dropped, Encoded, Sample, encode_samples
from d9d_data.corpus.fit import Limit, Policy
from d9d_data.fields.learned import LABELS, MASKS
from d9d_data.sources.document import Piece
from d9d_data.sources.kinds import kind_of
from d9d_data.sources.place import Record, Reject
from d9d_data.sources.records import value_of
from d9d_data.stream.packing import NO_TARGET
from d9d_data.tokenizer.base import TextTokenizer

Int64 = npt.NDArray[np.int64]


class TokensEncoder:
    """Encoder of records of token ids, with loss weight on the tokens to learn.

    Args:
        tokenizer: tokenizer that made the ids.
        ids: field of the ids.
        labels: field of the labels, if there is one.
        mask: field of the mask, if there is one.
        longest: maximum number of tokens of a record.
        too_long: treatment of longer records.
    """

    columns: Mapping[str, npt.DTypeLike] = {"weights": np.bool_}

    def __init__(
        self,
        tokenizer: TextTokenizer,
        ids: str,
        labels: str | None,
        mask: str | None,
        longest: int,
        too_long: Policy,
    ) -> None:
        self.vocab_size = tokenizer.vocab_size
        self._tokenizer = ChatTokenizer.of(tokenizer)
        self._ids, self._labels, self._mask = ids, labels, mask
        self._limit = Limit(longest, too_long)

    @classmethod
    def load(cls, tokenizer: TextTokenizer, file: Path | None, settings: dict[str, Any]) -> Self:  # noqa: ARG003
        """Make an encoder in a worker process, from values that can be pickled."""
        return cls(tokenizer, **settings)

    def encode(self, pieces: Iterable[Piece], reject: Reject) -> Iterator[Encoded]:
        """Read token ids; reject records whose ids, labels or masks are malformed."""
        return encode_samples(pieces, reject, self._sample)

    def _sample(self, record: Record) -> Sample | Dropped:
        where = str(record.place)
        ids = _numbers(record, self._ids)
        size = _unpadded(record, len(ids))
        outside = np.flatnonzero((ids[:size] < 0) | (ids[:size] >= self.vocab_size))
        if len(outside):
            raise DataError(
                f"{where}: {self._ids}[{outside[0]}] is {ids[outside[0]]}, but the tokenizer has the ids 0 to "
                f"{self.vocab_size - 1:,}; name the tokenizer that made the ids in data.tokenizer"
            )
        learned = self._learned(record, ids)[:size]
        part = self._limit.kept(size, where)
        if part is None or not is_trainable(learned[part]):
            learnable = np.flatnonzero(learned[1:]) + 2
            return Dropped(size, int(learnable[0]) if len(learnable) else 0)
        kept, weights = ids[:size][part], learned[part]
        return Sample(
            [kept],
            {"weights": [weights]},
            lost=[size - len(kept)],
            stop=self._tokenizer.stop_of(kept[1:][weights[1:]]),
            incomplete=bool(np.count_nonzero(learned[1:]) > np.count_nonzero(weights[1:])),
        )

    def _learned(self, record: Record, ids: Int64) -> npt.NDArray[np.bool_]:
        """Mask [N] of the tokens to learn, from the record's labels or mask; all true if the config names neither."""
        where = str(record.place)
        field = self._labels or self._mask
        if field is None:
            further = next((name for name in (*LABELS, *MASKS) if value_of(record, name) is not None), None)
            if further is not None:
                raise DataError(
                    f"{where} has {further}, but the first record has neither labels nor a mask; name the field in data"
                )
            return np.ones(len(ids), dtype=np.bool_)
        values = _numbers(record, field)
        if len(values) != len(ids):
            raise DataError(f"{where}: {field} has {len(values):,} values, but {self._ids} has {len(ids):,}")
        learned: npt.NDArray[np.bool_] = values != (0 if self._labels is None else NO_TARGET)
        wrong = np.flatnonzero(learned & (values != (1 if self._labels is None else ids)))
        if not len(wrong):
            return learned
        first = int(wrong[0])
        if self._labels is None:
            raise DataError(f"{where}: {field}[{first}] is {values[first]}; give 0 or 1")
        shifted = len(ids) > 1 and bool(np.all((values[:-1] == NO_TARGET) | (values[:-1] == ids[1:])))
        hint = "they are shifted already; store each label at the position of its token" if shifted else "repair it"
        raise DataError(
            f"{where}: {field}[{first}] is {values[first]}, but {self._ids}[{first}] is {ids[first]}; a label is the "
            f"token id at its own position, or {NO_TARGET}: {hint}"
        )


def _unpadded(record: Record, size: int) -> int:
    """Number of tokens before the padding that ``attention_mask`` marks.

    Raises:
        DataError: the mask is malformed, or marks padding before a token.
    """
    if value_of(record, "attention_mask") is None:
        return size
    mask = _numbers(record, "attention_mask")
    count = int(np.count_nonzero(mask))
    if len(mask) != size or not bool(np.all(mask[:count] == 1)):
        raise DataError(
            f"{record.place}: attention_mask is not {size:,} numbers, ones and then zeros; store the tokens without "
            "padding, or with padding at the end"
        )
    if not count:
        raise DataError(f"{record.place}: attention_mask has no ones, so there is no token; leave the record out")
    return count


def _numbers(record: Record, field: str) -> Int64:
    """Whole numbers of a field, [N].

    Raises:
        DataError: the field is missing, empty, or not a list of whole numbers.
    """
    value = value_of(record, field)
    where = f"{record.place}: {field}"
    if value is None:
        names = islice((name for name, item in record.values.items() if item is not None), 20)
        fields = ", ".join(str(name)[:40] for name in names) or "none"
        raise DataError(f"{record.place} has no field '{field}' (it has {fields}); give a list of numbers")
    if not isinstance(value, list | tuple):
        raise DataError(f"{where} is {kind_of(value)}, not a list of numbers")
    if not value:
        raise DataError(f"{where} is empty; leave the record out")
    try:
        numbers = np.asarray(value)
    except (ValueError, OverflowError):  # lists of several lengths
        numbers = np.asarray([], dtype=np.object_)
    if numbers.ndim == 1 and (numbers.dtype.kind in "ib" or (numbers.dtype.kind == "f" and set(value) <= {0, 1})):
        return numbers.astype(np.int64)
    refused = (index for index, item in enumerate(value) if not isinstance(item, int) or item.bit_length() > 63)
    wrong = next(refused, 0)
    raise DataError(f"{where}[{wrong}] is {str(value[wrong])[:40]}; give whole numbers of at most 64 bits")
