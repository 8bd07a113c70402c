"""Shards of a corpus as token files: complete or absent, so that work goes on where a killed process stopped.

Layout of a shard's directory: ``tokens.npy`` (uint16 or uint32 [N], every document followed by its end-of-text token),
``lengths.npy`` (int64 [D], tokens of each document), ``facts.json`` and a file for each of the encoder's columns, such
as ``weights.npy`` (bool [N]).
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
from d9d_core.extend import parse_json, read_regular

from d9d_data.corpus.cache import cached_directory
from d9d_data.corpus.encoder import Encoder
from d9d_data.corpus.npy_writer import NpyWriter
from d9d_data.corpus.plan import Shard
from d9d_data.sources.place import Place, refuse

TOKENS, LENGTHS, FACTS = "tokens.npy", "lengths.npy", "facts.json"


@dataclass(frozen=True, slots=True)
class FinishedShard:
    """Finished shard.

    Attributes:
        tokens: [N].
        lengths: int64 [D], tokens of each document.
        columns: values beside the tokens, [N] each.
        facts: what was left out or cut, and the labels by their numbers.
    """

    tokens: npt.NDArray[Any]
    lengths: npt.NDArray[np.int64]
    columns: Mapping[str, npt.NDArray[Any]]
    facts: dict[str, Any]


class Skips:
    """Counter of the malformed records that are left out, which keeps what is wrong with the first."""

    def __init__(self) -> None:
        self.count = 0
        self.first = ""

    def __call__(self, place: Place, problem: str) -> None:
        """Count a document."""
        self.count += 1
        self.first = self.first or f"{place} {problem}"


def write_shard(
    encoder: Encoder,
    shard: Shard,
    malformed: Literal["error", "skip"],
    work: Path,
    advance: Callable[[int], None],
) -> None:
    """Tokenise a shard, unless that is done already.

    Args:
        encoder: makes the tokens.
        shard: what to read.
        malformed: what to do with malformed records.
        work: directory of the shards' directories.
        advance: told about how many bytes were read since the last call.

    Raises:
        DataError: a file cannot be read, or a document is malformed.
        OSError: the directory cannot be written.
    """

    def build(directory: Path) -> None:
        skips, dropped, cut = Skips(), 0, 0
        labels: tuple[str | int, ...] = ()
        dtype = token_dtype(encoder.vocab_size)
        with ExitStack() as stack:
            tokens = stack.enter_context(NpyWriter(directory / TOKENS, dtype))
            lengths = stack.enter_context(NpyWriter(directory / LENGTHS, np.int64))
            columns = {
                name: stack.enter_context(NpyWriter(directory / f"{name}.npy", kind))
                for name, kind in encoder.columns.items()
            }
            for batch in encoder.encode(shard.pieces, skips if malformed == "skip" else refuse):
                dropped, cut, labels = dropped + batch.dropped, cut + batch.cut, batch.labels
                if batch.ids:
                    # Ids are below the vocabulary.
                    tokens.append(np.concatenate(list(batch.ids), dtype=dtype, casting="unsafe"))
                    lengths.append(np.asarray([len(ids) for ids in batch.ids], dtype=np.int64))
                    for name, column in columns.items():
                        column.append(np.concatenate(list(batch.columns[name])))
                advance(batch.characters)
        facts = {
            "skipped": skips.count,
            "first_skipped": skips.first,
            "dropped": dropped,
            "cut": cut,
            "labels": labels,
        }
        (directory / FACTS).write_text(json.dumps(facts), encoding="utf-8")

    files = (TOKENS, LENGTHS, FACTS, *(f"{name}.npy" for name in encoder.columns))
    cached_directory(work, shard.name, build, lambda _text: None, files)


def token_dtype(vocab_size: int) -> type[np.unsignedinteger[Any]]:
    """Type of token ids on disk."""
    return np.uint16 if vocab_size <= 2**16 else np.uint32


def read_shard(shard: Shard, work: Path, columns: Iterable[str]) -> FinishedShard:
    """Contents of a finished shard; its arrays are memory-mapped."""
    directory = work / shard.name
    return FinishedShard(
        tokens=np.load(directory / TOKENS, mmap_mode="r", allow_pickle=False),
        lengths=np.load(directory / LENGTHS, mmap_mode="r", allow_pickle=False),
        columns={name: np.load(directory / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in columns},
        facts=parse_json(read_regular(directory / FACTS)),
    )
