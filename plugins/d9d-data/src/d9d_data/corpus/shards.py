"""Shards of a corpus as directories of token files.

A directory is complete or absent, so a restarted process continues with the shards that a killed process had not
finished.

Layout of a shard's directory: ``tokens.npy`` (uint16 or uint32 [N], token ids of all documents, concatenated),
``lengths.npy`` (int64 [D], number of tokens of each document), ``lost.npy`` (int64 [D], number of tokens that each
document lost to truncation), ``numbers.npy`` (int64 [D], number of each document's record among all records of the
shard), ``facts.json``, and a file for each of the encoder's columns, such as ``weights.npy`` (bool [N]).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from d9d_core.untrusted import parse_json, read_regular

from d9d_data.corpus.cache import cached_directory
from d9d_data.corpus.encoder import Encoder
from d9d_data.corpus.fit import Tally
from d9d_data.corpus.npy_writer import NpyWriter
from d9d_data.corpus.plan import Shard
from d9d_data.sources.place import Place, refuse

TOKENS, LENGTHS, LOST, NUMBERS, FACTS = "tokens.npy", "lengths.npy", "lost.npy", "numbers.npy", "facts.json"


@dataclass(frozen=True, slots=True)
class FinishedShard:
    """Contents of a finished shard.

    Attributes:
        tokens: token ids [N].
        lengths: int64 [D], number of tokens of each document.
        lost: int64 [D], number of tokens that each document lost to truncation.
        numbers: int64 [D], number of each document's record among all records of the shard.
        columns: values per token by column, [N] each.
        tally: counts of the shard's records.
        facts: contents of ``facts.json``, such as the number of malformed records and the list of labels.
    """

    tokens: npt.NDArray[Any]
    lengths: npt.NDArray[np.int64]
    lost: npt.NDArray[np.int64]
    numbers: npt.NDArray[np.int64]
    columns: Mapping[str, npt.NDArray[Any]]
    tally: Tally
    facts: dict[str, Any]

    @property
    def records(self) -> int:
        """Number of all records of the shard, with malformed and dropped records."""
        skipped: int = self.facts["skipped"]
        return self.tally.records + skipped


class Skips:
    """Counter of malformed records, which keeps the problem of the first malformed record."""

    def __init__(self) -> None:
        self.count = 0
        self.first = ""

    def __call__(self, place: Place, problem: str) -> None:
        """Count a malformed record."""
        self.count += 1
        self.first = self.first or f"{place} {problem}"


def write_shard(
    encoder: Encoder,
    shard: Shard,
    malformed: Literal["error", "skip"],
    work: Path,
    advance: Callable[[int], None],
) -> None:
    """Write a tokenised shard of a corpus, unless it is complete already.

    Args:
        encoder: encoder of the records.
        shard: shard to read.
        malformed: treatment of malformed records.
        work: parent of the shards' directories.
        advance: called with the approximate number of bytes read since the last call.

    Raises:
        DataError: a file cannot be read, a record is malformed, or the directory cannot be written.
    """

    def build(directory: Path) -> None:
        skips, tally = Skips(), Tally()
        labels: tuple[str | int, ...] = ()
        dtype = token_dtype(encoder.vocab_size)
        with ExitStack() as stack:
            tokens = stack.enter_context(NpyWriter(directory / TOKENS, dtype))
            lengths, lost, numbers = (
                stack.enter_context(NpyWriter(directory / file, np.int64)) for file in (LENGTHS, LOST, NUMBERS)
            )
            columns = {
                name: stack.enter_context(NpyWriter(directory / f"{name}.npy", kind))
                for name, kind in encoder.columns.items()
            }
            for batch in encoder.encode(shard.pieces, skips if malformed == "skip" else refuse):
                tally, labels = tally + batch.tally, batch.labels
                if batch.ids:
                    # Every id fits: ids are less than the size of the vocabulary.
                    tokens.append(np.concatenate(list(batch.ids), dtype=dtype, casting="unsafe"))
                    lengths.append(np.asarray([len(ids) for ids in batch.ids], dtype=np.int64))
                    lost.append(np.asarray(batch.lost or [0] * len(batch.ids), dtype=np.int64))
                    numbers.append(np.asarray(batch.numbers, dtype=np.int64))
                    for name, column in columns.items():
                        column.append(np.concatenate(list(batch.columns[name])))
                advance(batch.characters)
        facts = {
            "skipped": skips.count,
            "first_skipped": skips.first,
            "tally": tally.written(),
            "labels": labels,
        }
        (directory / FACTS).write_text(json.dumps(facts), encoding="utf-8")

    files = (TOKENS, LENGTHS, LOST, NUMBERS, FACTS, *(f"{name}.npy" for name in encoder.columns))
    cached_directory(work, shard.name, build, lambda _text: None, files)


def token_dtype(vocab_size: int) -> type[np.unsignedinteger[Any]]:
    """Dtype of token ids on disk."""
    return np.uint16 if vocab_size <= 2**16 else np.uint32


def read_shard(shard: Shard, work: Path, columns: Iterable[str]) -> FinishedShard:
    """Read a finished shard; its arrays are memory-mapped."""
    directory = work / shard.name

    def mapped(file: str) -> npt.NDArray[Any]:
        array: npt.NDArray[Any] = np.load(directory / file, mmap_mode="r", allow_pickle=False)
        return array

    facts = parse_json(read_regular(directory / FACTS))
    return FinishedShard(
        tokens=mapped(TOKENS),
        lengths=mapped(LENGTHS),
        lost=mapped(LOST),
        numbers=mapped(NUMBERS),
        columns={name: mapped(f"{name}.npy") for name in columns},
        tally=Tally.of(facts["tally"]),
        facts=facts,
    )
