"""Tokenisation of a corpus to token files.

Layout of the directory: ``facts.json``, ``tokenizer/``, and for each split ``<split>.tokens.npy`` (uint16 or uint32
[N], token ids of all documents, concatenated), ``<split>.starts.npy`` (int64 [D + 1], index of each document's
first token, then N) and a file for each of the encoder's columns, such as ``<split>.weights.npy`` (bool [N]). There is
a file of ``scales`` only if some loss weight is not 1, and ``<split>.lost.npy`` (int64 [D], number of tokens that each
document lost to truncation) only if some document lost tokens.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from d9d_core.errors import DataError

from d9d_data.config import BpeTokenizer, LabelledConfig, PreparedConfig, TokenizedConfig
from d9d_data.corpus.cache import cached_directory
from d9d_data.corpus.encoder import Encoder
from d9d_data.corpus.encoding import Encoding, encoding_of, limit_of
from d9d_data.corpus.fit import Limit, Tally, nothing_left
from d9d_data.corpus.npy_writer import NpyWriter
from d9d_data.corpus.plan import Shard
from d9d_data.corpus.pool import default_workers, tokenise_in_processes
from d9d_data.corpus.shards import Skips, read_shard, token_dtype, write_shard
from d9d_data.corpus.worker import TOKENIZER, Setup
from d9d_data.fields.label_table import Classes
from d9d_data.sources.document import texts_of
from d9d_data.sources.place import Numbering, Reject, refuse
from d9d_data.tokenizer.select import make_tokenizer

Split = Literal["train", "held_out"]
FACTS = "facts.json"
SPLITS: tuple[Split, Split] = ("train", "held_out")
# Largest number of tokens and documents copied from a shard at a time.
_CHUNK_TOKENS = 1 << 22
_CHUNK_DOCUMENTS = 1 << 20


def tokenise(config: PreparedConfig, shards: Sequence[Shard], work: Path, directory: Path) -> dict[str, Any]:
    """Tokenise a corpus: make the tokenizer, tokenise the shards, and join them.

    The result depends neither on the division into shards nor on the number of worker processes.

    Args:
        config: config of the dataset, which decides how documents become tokens.
        shards: shards of the corpus.
        work: directory of finished shards, which are not tokenised again.
        directory: directory of the result.

    Returns:
        Contents of ``facts.json``, among them ``vocab_size``, a description of the ``tokenizer``, ``unigram_entropy``
        of the train split in nats per token, and the number of ``skipped`` malformed records.

    Raises:
        DataError: a file cannot be read, a record is malformed, the tokenizer is invalid, there is no text, or a split
            has no document.
        TrainingError: a worker process died.
    """
    _train_tokenizer(config, shards, work)
    setup = Setup.of(config, work)
    encoder, tokenizer = setup.make_encoder()
    tokenizer.save(directory / "tokenizer")
    _tokenise_shards(config.preparation_workers, setup, encoder, shards, work)
    facts: dict[str, Any] = {"vocab_size": tokenizer.vocab_size, "tokenizer": tokenizer.description}
    facts |= {"adds_end": tokenizer.adds_end, "adds_after": tokenizer.adds_after}
    facts |= _join(encoder, shards, config.held_out, encoding_of(config), limit_of(config), work, directory)
    stops = sorted(facts["tally"]["stops"].items(), key=lambda item: (-item[1], item[0]))
    facts["stop_token_ids"] = [tokenizer.id_of(token) for token, _ in stops]
    (directory / FACTS).write_text(json.dumps(facts, indent=2), encoding="utf-8")
    return facts


def _train_tokenizer(config: PreparedConfig, shards: Sequence[Shard], work: Path) -> None:
    """Train the tokenizer, if the config asks for a trained one."""
    if isinstance(config, TokenizedConfig) and isinstance(config.tokenizer, BpeTokenizer):
        choice, end = config.tokenizer, config.end_of_text
        reject = Skips() if config.malformed == "skip" else refuse
        # A labelled record without text is malformed and has a number; an empty document is no record.
        texts = _training_texts(shards, config.held_out, reject, empty=isinstance(config, LabelledConfig))
        # Training reads the whole corpus. So the trained tokenizer is kept, and a start after a kill uses it.
        with progress_bar("learning a tokenizer", None):
            cached_directory(work, TOKENIZER, lambda to: make_tokenizer(choice, end, texts).save(to), _silent)


def _silent(_text: str) -> None:
    """Ignore a line that would be printed."""


def _training_texts(shards: Sequence[Shard], held_out: float, reject: Reject, empty: bool) -> Iterator[str]:
    """Yield the texts of the records that are not held out.

    Args:
        shards: shards of the corpus.
        held_out: fraction of the records that is held out.
        reject: called for each malformed record.
        empty: whether an empty text has a number, see :class:`~d9d_data.sources.place.Numbering`.
    """
    numbering = Numbering(reject)
    texts = (text for shard in shards for piece in shard.pieces for text in texts_of(piece, numbering.reject))
    for number, text in numbering.of(text for text in texts if empty or text.strip()):
        if text.strip() and int((number + 1) * held_out) == int(number * held_out):  # not held out, as in _set_aside
            yield text


def _set_aside(numbers: npt.NDArray[np.int64], held_out: float) -> npt.NDArray[np.bool_]:
    """Whether each record is held out: one of every 1 / held_out, by its number among all records.

    Records that are left out have numbers too: a tokenizer is trained before it is known which texts are too long, and
    must not read the held-out texts.
    """
    aside: npt.NDArray[np.bool_] = np.floor((numbers + 1) * held_out) > np.floor(numbers * held_out)
    return aside


def _tokenise_shards(wanted: int | None, setup: Setup, encoder: Encoder, shards: Sequence[Shard], work: Path) -> None:
    workers = min(default_workers() if wanted is None else wanted, len(shards))
    with progress_bar("tokenising", sum(shard.size for shard in shards)) as advance:
        # One shard takes less time than starting a process, and other processes cannot read this process's memory://.
        if workers == 0 or len(shards) == 1 or any(_in_memory(shard) for shard in shards):
            for shard in shards:
                write_shard(encoder, shard, setup.malformed, work, advance)
        else:
            tokenise_in_processes(setup, shards, workers, advance)


def _in_memory(shard: Shard) -> bool:
    return any(piece.file.address.startswith("memory://") for piece in shard.pieces)


def _join(
    encoder: Encoder,
    shards: Sequence[Shard],
    held_out: float,
    encoding: Encoding,
    limit: Limit | None,
    work: Path,
    directory: Path,
) -> dict[str, Any]:
    """Write the token files of both splits from the finished shards, and return facts about them.

    Args:
        encoder: encoder, whose columns become files.
        shards: finished shards.
        held_out: fraction of the records that is held out.
        encoding: encoding of the records.
        limit: token limit of a text, if there is one.
        work: parent of the shards' directories.
        directory: directory of the files.
    """
    counts = np.zeros(encoder.vocab_size, dtype=np.int64)
    before, skipped, first_skipped, tally = 0, 0, "", Tally()  # before: number of records of earlier shards
    learned: dict[Split, int] = dict.fromkeys(SPLITS, 0)
    together = len(encoding.texts) or 1
    classes = _classes(encoder, shards, encoding, work)
    columns = dict(encoder.columns)
    if "scales" in columns and not any(np.any(_scales(shard, work) != 1) for shard in shards):
        del columns["scales"]
    some_lost = any(read_shard(shard, work, ()).tally.cut for shard in shards)
    kinds = {"tokens": token_dtype(encoder.vocab_size), "starts": np.int64, **columns}
    kinds |= {"lost": np.int64} if some_lost else {}
    with ExitStack() as stack:
        writers = {
            name: {split: stack.enter_context(NpyWriter(directory / f"{split}.{name}.npy", dtype)) for split in SPLITS}
            for name, dtype in kinds.items()
        }
        tokens_of, starts_of = writers["tokens"], writers["starts"]
        for split in SPLITS:
            starts_of[split].append(np.zeros(1, dtype=np.int64))
        for shard in shards:
            there = read_shard(shard, work, columns)
            skipped += there.facts["skipped"]
            first_skipped = first_skipped or there.facts["first_skipped"]
            tally += there.tally
            begin = 0
            for place, chunk_lengths in _chunks(there.lengths):
                here = slice(begin, begin + len(chunk_lengths))
                chunk, chunk_lost = there.tokens[place], there.lost[here]
                aside = _set_aside(before + there.numbers[here], held_out)
                begin = here.stop
                for split, chosen in (("train", ~aside), ("held_out", aside)):
                    kept = slice(None) if chosen.all() else np.repeat(chosen, chunk_lengths)
                    taken = chunk[kept]
                    starts_of[split].append(tokens_of[split].length + np.cumsum(chunk_lengths[chosen]))
                    tokens_of[split].append(taken)
                    if some_lost:
                        writers["lost"][split].append(chunk_lost[chosen])
                    for name, column in there.columns.items():
                        values = column[place][kept]
                        if classes is not None and name == "labels":
                            values = classes.mapped(values, there.facts["labels"])
                        if name == "weights":
                            learned[split] += int(np.count_nonzero(values))
                        writers[name][split].append(values)
                    if split == "train":
                        counts += np.bincount(taken, minlength=len(counts))
            before += there.records
        documents = {split: (starts.length - 1) // together for split, starts in starts_of.items()}
    files = {piece.file.address for shard in shards for piece in shard.pieces}
    if not any(documents.values()) and tally.dropped:
        assert limit is not None
        raise nothing_left(tally, limit, encoding.words)
    _check_splits(documents, held_out, len(files), skipped, first_skipped, tally.dropped)
    return {
        "unigram_entropy": unigram_entropy(counts),
        "skipped": skipped,
        "first_skipped": first_skipped,
        "tally": tally.written(),
        "learned": learned,
        "num_classes": classes.count if classes else 0,
        "labels": classes.names if classes else None,
    }


def _scales(shard: Shard, work: Path) -> npt.NDArray[Any]:
    return read_shard(shard, work, ["scales"]).columns["scales"]


def _classes(encoder: Encoder, shards: Sequence[Shard], encoding: Encoding, work: Path) -> Classes | None:
    """Classes of the labels in all shards, if the records have labels."""
    if "labels" not in encoder.columns:
        return None
    tables = [read_shard(shard, work, ()).facts["labels"] for shard in shards]
    classes = Classes(tables, encoding.settings["names"])
    if classes.count < 2:
        raise DataError(
            f"data.label: the corpus has labels of {classes.count} classes; name another field or other sources"
        )
    return classes


def _chunks(lengths: npt.NDArray[np.int64]) -> Iterator[tuple[slice, npt.NDArray[np.int64]]]:
    """Yield slices of tokens with the lengths of their documents: at most _CHUNK_TOKENS, or one document."""
    begin = 0
    for block_begin in range(0, len(lengths), _CHUNK_DOCUMENTS):
        block = lengths[block_begin : block_begin + _CHUNK_DOCUMENTS]
        ends = begin + np.cumsum(block)
        first = 0
        while first < len(block):
            after = max(first + 1, int(np.searchsorted(ends, begin + _CHUNK_TOKENS, side="right")))
            end = int(ends[after - 1])
            yield slice(begin, end), block[first:after]
            first, begin = after, end


def _check_splits(
    documents: dict[Split, int], held_out: float, found: int, skipped: int, first: str, dropped: int
) -> None:
    left_out, kept = skipped + dropped, sum(documents.values())
    empty = [split for split in SPLITS if not documents[split] and (split == "train" or held_out)]
    if kept and empty and left_out:
        raise DataError(
            f"data.held_out: of {kept + left_out:,} records, {left_out:,} are malformed or too long, and no other is "
            f"in the {empty[0]} split; set another fraction aside, or repair the records"
        )
    if not documents["train"] and skipped:
        raise DataError(
            f"data.sources: the corpus is empty: no record of its {found} files can be used; {skipped:,} are "
            f"malformed, the first of them: {first}"
        )
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
def progress_bar(label: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on standard error while the ``with`` block runs, if standard error is a terminal.

    Args:
        label: text next to the bar.
        total: amount of work; ``None`` if unknown.

    Yields:
        A function to call with the amount of work done since its last call.
    """
    if not sys.stderr.isatty():
        yield lambda _amount: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(label, total=total)
        yield lambda amount: progress.advance(task, amount)
