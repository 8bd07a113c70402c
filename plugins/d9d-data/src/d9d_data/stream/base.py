"""Base classes for streams of packs (the microbatches of a step), and for streams over a corpus."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from d9d_core.errors import DataError
from d9d_core.types import Pack, State

from d9d_data.corpus.identity import FORMAT
from d9d_data.corpus.prepare import Corpus
from d9d_data.stream.reader import PackReader, PackSource


def facts_of(corpus: Corpus) -> State:
    """Facts of the split that a stream reads: its sizes, and the number of tokens to learn.

    Plain texts also have the id of the end-of-text token and the entropy (nats per token) of the train split.
    ``skipped`` counts malformed records of both splits, ``cut_documents`` truncated records, ``incomplete`` truncated
    records that lost tokens to learn, and ``dropped`` records that were left out because they are too long or have no
    token to learn. If records were truncated, ``longest`` is the number of tokens of the longest. If only some tokens
    are learned, ``stop_learned`` counts the records whose last learned token is one of the special ``stop_token_ids``.
    """
    facts: dict[str, Any] = {
        "vocab_size": corpus.vocab_size,
        "tokens": len(corpus.tokens),
        "documents": len(corpus.starts) - 1,
        "tokenizer": corpus.tokenizer,
        "skipped": corpus.skipped,
    }
    if corpus.limit is not None:
        tally = corpus.losses()
        facts["cut_documents"] = tally.cut
        further = {
            "longest": tally.longest if tally.cut else 0,
            "incomplete": tally.incomplete,
            "dropped": tally.dropped,
        }
        facts |= {name: count for name, count in further.items() if count}
    if corpus.texts:
        facts |= {"texts": list(corpus.texts), "texts_per_sample": len(corpus.texts)}
    if corpus.labels is not None:
        names = {} if corpus.label_names is None else {"labels": list(corpus.label_names)}
        return {**facts, "num_classes": corpus.num_classes, **names}
    if not corpus.encoding.targets:
        return facts
    if corpus.weights is None:
        end = int(corpus.tokens[-1])  # the end-of-text token, with which the last document ends
        return {**facts, "eos_token_id": end, "unigram_entropy": corpus.unigram_entropy}
    stops = {"stop_learned": corpus.tally.stopped, "stop_token_ids": list(corpus.stop_token_ids)}
    return {**facts, "learned_tokens": corpus.learned, **stops}


class PackStream:
    """Base of the streams of packs; see :class:`d9d_core.data.DataStream`.

    The state is the number of samples consumed by all ranks together, from which alone the source builds any pack, and
    a fingerprint of the data.

    Args:
        source: source of this rank's share of any pack.
        batch_size: number of samples of a pack, over all ranks.
        workers: number of processes that build packs ahead.
        identity: text with all settings and digests that determine the order of the samples, except the seed.
        needs: names of the settings in ``identity``, for error messages.

    Attributes:
        source: the argument ``source``; a mixture reads single samples from it.
    """

    #: Version of the rules by which texts become tokens; ``None`` for streams of other samples.
    tokenisation: ClassVar[int | None] = FORMAT

    def __init__(self, source: PackSource, batch_size: int, workers: int, identity: str, needs: str) -> None:
        self.source = source
        self._batch_size = batch_size
        self._reader = PackReader(source, batch_size, workers)
        self._consumed = 0
        self._needs = needs
        self._fingerprint = hashlib.sha256(identity.encode()).hexdigest()[:16]

    def next_pack(self) -> Pack:
        """Microbatches of this rank for the next step: CPU tensors by name.

        Raises:
            DataError: a worker process failed.
            TrainingError: a worker process died.
        """
        taken = self._reader.read(self._consumed)
        self._consumed += self._batch_size
        return taken

    def state(self) -> State:
        """Number of samples consumed by all ranks, fingerprint of the data, and version of the tokenisation."""
        rules = {} if self.tokenisation is None else {"tokenisation": self.tokenisation}
        return {"consumed": self._consumed, "fingerprint": self._fingerprint, **rules}

    def load_state(self, state: State) -> None:
        """Continue at ``state``; ranks, microbatch size and workers may differ from the saved run.

        Raises:
            DataError: the state belongs to other data, or is damaged.
        """
        consumed, fingerprint = state.get("consumed"), state.get("fingerprint")
        if fingerprint != self._fingerprint:
            older = ""
            if self.tokenisation is not None and state.get("tokenisation", 0) != self.tokenisation:
                older = (
                    "another version of d9d-data saved it and made other tokens of some texts (see CHANGELOG.md), "
                    "so the same sources may give other data now; "
                )
            raise DataError(
                f"the checkpoint's data position belongs to other data (its fingerprint is {fingerprint}, now it is "
                f"{self._fingerprint}); {older}{self._needs} must stay unchanged; to train on other data, start a new "
                "run from the saved weights: set model.pretrained to the directory of this run or checkpoint, and "
                "another run.name"
            )
        if not isinstance(consumed, int) or consumed < 0:
            raise DataError(
                f"the checkpoint's data position is damaged: consumed is {consumed!r}; use another checkpoint"
            )
        self._consumed = consumed

    def close(self) -> None:
        """End the worker processes, if any were started; without this call, they end with the stream object."""
        self._reader.close()


class CorpusStream(PackStream):
    """Base of the streams over a corpus.

    Args:
        corpus: corpus to read.
        source, batch_size, workers, identity: see :class:`PackStream`.
        settings: names of the job-file fields that ``identity`` has in addition to the corpus, for error messages.
    """

    def __init__(
        self,
        corpus: Corpus,
        source: PackSource,
        batch_size: int,
        workers: int,
        identity: str,
        settings: Sequence[str],
    ) -> None:
        *others, last = ("the contents of the sources", "tokenizer", "split", "held_out", *settings)
        if "format" in corpus.encoding.settings:
            others.append("format")
        super().__init__(source, batch_size, workers, identity, f"{', '.join(others)} and {last}")
        self._corpus = corpus

    def save_assets(self, directory: Path) -> None:
        """Write the tokenizer's files in the format of transformers, unless an export copies the pretrained model's."""
        self._corpus.save_assets(directory)
