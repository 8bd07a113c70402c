"""Tokenisation of a corpus to token files.

Layout of the directory: ``facts.json``, ``tokenizer/``, and for each split ``<split>.tokens.npy`` (uint16 or uint32
[N], every document followed by its end-of-text token) and ``<split>.starts.npy`` (int64 [D + 1], where documents start,
and N).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from d9d_core.extend import DataError

from d9d_data.config import CorpusConfig
from d9d_data.corpus.npy_writer import NpyWriter
from d9d_data.sources.document import Piece, texts_of
from d9d_data.sources.lines import Reject, refuse
from d9d_data.tokenizer.base import TextTokenizer
from d9d_data.tokenizer.select import make_tokenizer

Split = Literal["train", "held_out"]
FACTS = "facts.json"
SPLITS: tuple[Split, Split] = ("train", "held_out")
# Characters encoded in one call: enough to keep all cores busy, little enough to show progress.
_BATCH_CHARACTERS = 2_000_000


class Skips:
    """Counter of the malformed documents that are left out, which keeps what is wrong with the first."""

    def __init__(self) -> None:
        self.count = 0
        self.first = ""

    def __call__(self, message: str) -> None:
        """Count a document."""
        self.count += 1
        self.first = self.first or message


def tokenise(config: CorpusConfig, pieces: Sequence[Piece], directory: Path) -> dict[str, Any]:
    """Tokenise a corpus: make the tokenizer, encode all documents, and write everything into ``directory``.

    Returns:
        The facts: ``vocab_size``, ``tokenizer`` in words, ``unigram_entropy`` of the train split in nats per token,
        ``skipped`` malformed documents and what is wrong with the first of them.

    Raises:
        DataError: a file cannot be read, the tokenizer is none, there is no text, or no document is set aside.
    """
    skips, skipped_before = Skips(), Skips()
    skip = config.malformed == "skip"
    training_texts = (
        text for text, split in _texts(pieces, config.held_out, skipped_before if skip else refuse) if split == "train"
    )
    tokenizer = make_tokenizer(config.tokenizer, config.end_of_text, training_texts)
    tokenizer.save(directory / "tokenizer")
    counts = _encode(tokenizer, pieces, config.held_out, directory, skips if skip else refuse)
    facts = {
        "vocab_size": tokenizer.vocab_size,
        "tokenizer": tokenizer.description,
        "unigram_entropy": unigram_entropy(counts),
        "skipped": skips.count,
        "first_skipped": skips.first,
    }
    (directory / FACTS).write_text(json.dumps(facts, indent=2), encoding="utf-8")
    return facts


def _encode(
    tokenizer: TextTokenizer, pieces: Sequence[Piece], held_out: float, directory: Path, reject: Reject
) -> npt.NDArray[np.int64]:
    """Write the token files and return how often each id stands in the train split: [vocabulary]."""
    counts = np.zeros(tokenizer.vocab_size, dtype=np.int64)
    starts: dict[Split, list[int]] = {split: [0] for split in SPLITS}
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
    end = np.asarray([tokenizer.end_of_text_id])
    with ExitStack() as stack:
        advance = stack.enter_context(progress_bar("tokenising", len(pieces)))
        writers = {split: stack.enter_context(NpyWriter(directory / f"{split}.tokens.npy", dtype)) for split in SPLITS}
        for batch in _batches(_texts(pieces, held_out, reject)):
            for ids, (_, split) in zip(tokenizer.encode([text for text, _ in batch]), batch, strict=True):
                document = np.concatenate([ids, end])
                writers[split].append(document)
                starts[split].append(writers[split].length)
                if split == "train":
                    counts += np.bincount(document, minlength=len(counts))
            advance(len(batch))
    _check_splits({split: len(places) - 1 for split, places in starts.items()}, held_out, len(pieces))
    for split, places in starts.items():
        np.save(directory / f"{split}.starts.npy", np.asarray(places, dtype=np.int64), allow_pickle=False)
    return counts


def _texts(pieces: Iterable[Piece], held_out: float, reject: Reject) -> Iterator[tuple[str, Split]]:
    """Documents that hold text. Every (1 / held_out)-th is set aside, spread evenly over the corpus."""
    index = 0
    for piece in pieces:
        for text in texts_of(piece, reject):
            if text.strip():
                aside = int((index + 1) * held_out) > int(index * held_out)
                yield text, "held_out" if aside else "train"
                index += 1


def _batches(texts: Iterable[tuple[str, Split]]) -> Iterator[list[tuple[str, Split]]]:
    batch: list[tuple[str, Split]] = []
    characters = 0
    for item in texts:
        batch.append(item)
        characters += len(item[0])
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _check_splits(documents: dict[Split, int], held_out: float, found: int) -> None:
    if not documents["train"]:
        raise DataError(f"data.sources: the corpus is empty: none of its {found} files holds text; name other sources")
    if held_out and not documents["held_out"]:
        raise DataError(
            f"data.held_out: {held_out:g} of {documents['train']} documents is less than one, so the held_out split is "
            "empty; set more aside, or split the corpus into more files"
        )


def unigram_entropy(counts: npt.NDArray[np.int64]) -> float:
    """Entropy of a frequency table in nats."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


@contextmanager
def progress_bar(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """Progress bar on standard error while the block runs, if that is a terminal.

    Args:
        label: text beside the bar.
        total: amount of work.

    Yields:
        A function to call with the amount done since the last call.
    """
    if not sys.stderr.isatty():
        yield lambda _amount: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(label, total=total)
        yield lambda amount: progress.advance(task, amount)
