"""Shards of a corpus as token files: complete or absent, so that work goes on where a killed process stopped.

Layout of a shard's directory: ``tokens.npy`` (uint16 or uint32 [N], every document followed by its end-of-text token),
``lengths.npy`` (int64 [D], tokens of each document) and ``facts.json``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from d9d_core.extend import parse_json, read_regular

from d9d_data.corpus.cache import cached_directory
from d9d_data.corpus.npy_writer import NpyWriter
from d9d_data.corpus.plan import Shard
from d9d_data.sources.document import texts_of
from d9d_data.sources.place import Place, refuse
from d9d_data.tokenizer.base import TextTokenizer

TOKENS, LENGTHS, FACTS = "tokens.npy", "lengths.npy", "facts.json"
# Characters encoded in one call: enough to keep all cores busy, little enough to show progress.
_BATCH_CHARACTERS = 2_000_000


class Skips:
    """Counter of the malformed documents that are left out, which keeps what is wrong with the first."""

    def __init__(self) -> None:
        self.count = 0
        self.first = ""

    def __call__(self, place: Place, problem: str) -> None:
        """Count a document."""
        self.count += 1
        self.first = self.first or f"{place} {problem}"


def write_shard(
    tokenizer: TextTokenizer,
    shard: Shard,
    malformed: Literal["error", "skip"],
    work: Path,
    advance: Callable[[int], None],
) -> None:
    """Tokenise a shard, unless that is done already.

    Args:
        tokenizer: makes the tokens.
        shard: what to read.
        malformed: what to do with malformed documents.
        work: directory of the shards' directories.
        advance: told about how many bytes were read since the last call.

    Raises:
        DataError: a file cannot be read, or a document is malformed.
        OSError: the directory cannot be written.
    """

    def build(directory: Path) -> None:
        skips = Skips()
        texts = (text for piece in shard.pieces for text in texts_of(piece, skips if malformed == "skip" else refuse))
        end = np.asarray([tokenizer.end_of_text_id])
        dtype = token_dtype(tokenizer.vocab_size)
        with (
            NpyWriter(directory / TOKENS, dtype) as tokens,
            NpyWriter(directory / LENGTHS, np.int64) as lengths,
        ):
            for batch in _batches(text for text in texts if text.strip()):
                encoded = tokenizer.encode(batch)
                parts = [part for ids in encoded for part in (ids, end)]
                tokens.append(np.concatenate(parts, dtype=dtype, casting="unsafe"))  # ids are below the vocabulary
                lengths.append(np.asarray([len(ids) + 1 for ids in encoded], dtype=np.int64))
                advance(sum(map(len, batch)))
        facts = {"skipped": skips.count, "first_skipped": skips.first}
        (directory / FACTS).write_text(json.dumps(facts), encoding="utf-8")

    cached_directory(work, shard.name, build, lambda _text: None, (TOKENS, LENGTHS, FACTS))


def token_dtype(vocab_size: int) -> type[np.unsignedinteger[Any]]:
    """Type of token ids on disk."""
    return np.uint16 if vocab_size <= 2**16 else np.uint32


def read_shard(shard: Shard, work: Path) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64], dict[str, Any]]:
    """Tokens [N] and lengths [D], memory-mapped, and facts of a finished shard."""
    directory = work / shard.name
    tokens: npt.NDArray[Any] = np.load(directory / TOKENS, mmap_mode="r", allow_pickle=False)
    lengths: npt.NDArray[np.int64] = np.load(directory / LENGTHS, mmap_mode="r", allow_pickle=False)
    facts: dict[str, Any] = parse_json(read_regular(directory / FACTS))
    return tokens, lengths, facts


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
