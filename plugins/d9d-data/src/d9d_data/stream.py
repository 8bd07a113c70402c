"""Streams of packs over a corpus: what all have in common, and the stream of packed text."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from d9d_core.errors import DataError
from d9d_core.protocols import DataContext, Pack, State

from d9d_data.config import TextConfig
from d9d_data.corpus import Corpus, prepare
from d9d_data.layout import Layout
from d9d_data.order import SampleOrder
from d9d_data.packing import pack, sample_count
from d9d_data.reader import Arrays, PackReader, PackSource


def build_text(config: TextConfig, context: DataContext) -> TextStream:
    """Prepare the corpus (once, then from the cache) and open its stream.

    Raises:
        DataError: the data or the sizes cannot be used; the text says what to change.
    """
    return TextStream(config, context, prepare(config, context.cache_dir, context.note))


class CorpusStream:
    """An endless stream of packs; see :class:`d9d_core.protocols.DataStream`.

    Its state is the number of samples consumed by all ranks together, and what identifies the data: the source builds
    any pack from that number alone.

    Args:
        corpus: the documents.
        source: builds this rank's part of any pack.
        batch_size: samples of a pack, over all ranks.
        workers: processes that build packs ahead.
        identity: everything that decides which samples come when, apart from the seed; as words.
        settings: the fields of the job file behind that, for messages.
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
        self._corpus = corpus
        self._batch_size = batch_size
        self._reader = PackReader(source, batch_size, workers)
        self._consumed = 0
        self._settings = settings
        self._fingerprint = hashlib.sha256(identity.encode()).hexdigest()[:16]

    def next_pack(self) -> Pack:
        """This rank's microbatches of the next step: int64 CPU tensors [B, S] by the names of language modelling.

        Raises:
            DataError: a worker process died.
        """
        taken = self._reader.read(self._consumed)
        self._consumed += self._batch_size
        return taken

    def state(self) -> State:
        """Samples consumed by all ranks together, and what identifies the data."""
        return {"consumed": self._consumed, "fingerprint": self._fingerprint}

    def load_state(self, state: State) -> None:
        """Continue at ``state``; ranks, microbatch size and workers may differ from those it was saved with.

        Raises:
            DataError: the state belongs to other data.
        """
        consumed, fingerprint = state.get("consumed"), state.get("fingerprint")
        if fingerprint != self._fingerprint:
            raise DataError(
                f"the checkpoint's data position belongs to other data (its fingerprint is {fingerprint}, now it is "
                f"{self._fingerprint}); the contents of the sources, tokenizer, split, held_out, "
                f"{', '.join(self._settings[:-1])} and {self._settings[-1]} must be as they were; to train on other "
                "data, start a new run from the saved weights: 'd9d state convert CHECKPOINT DIRECTORY', then "
                "'model.pretrained: DIRECTORY' and another run.name"
            )
        if not isinstance(consumed, int) or consumed < 0:
            raise DataError(
                f"the checkpoint's data position is damaged: consumed is {consumed!r}; use another checkpoint"
            )
        self._consumed = consumed

    def save_assets(self, directory: Path) -> None:
        """Write ``tokenizer.json`` and ``tokenizer_config.json`` as transformers reads them."""
        self._corpus.save_assets(directory)

    def close(self) -> None:
        """End the worker processes, if there are any; otherwise they end with the stream."""
        self._reader.close()


class TextStream(CorpusStream):
    """Samples of equal length, packed with documents.

    A pack is the next ``batch_size`` samples of one global order. Rank r of R takes the r-th of R equal runs of it, cut
    into microbatches. So neither ranks nor microbatch size have a say in what is trained on when.
    """

    def __init__(self, config: TextConfig, context: DataContext, corpus: Corpus) -> None:
        layout = Layout.of(context)
        tokens = len(corpus.tokens)
        samples = sample_count(tokens, config.sequence_length)
        if samples == 0:
            raise DataError(
                f"data.sequence_length: {config.sequence_length} positions need {config.sequence_length + 1} tokens, "
                f"but the {config.split} split has {tokens}; use at most {tokens - 1}, or more text"
            )
        source = TextPacks(corpus, SampleOrder(samples, context.seed, config.shuffle), config.sequence_length, layout)
        identity = f"{corpus.digest} {config.sequence_length} {config.shuffle}"
        super().__init__(corpus, source, layout.batch_size, config.workers, identity, ("sequence_length", "shuffle"))
        self._source = source

    @property
    def facts(self) -> State:
        """Sizes of this split, and the entropy (nats per token) of the train split's token frequencies."""
        return {
            "vocab_size": self._corpus.vocab_size,
            "sequence_length": self._source.sequence_length,
            "tokens": len(self._corpus.tokens),
            "documents": len(self._corpus.starts) - 1,
            "samples": self._source.order.samples,
            "unigram_entropy": self._corpus.unigram_entropy,
            "tokenizer": self._corpus.tokenizer,
        }


@dataclass(frozen=True, slots=True)
class TextPacks:
    """Builds one rank's part of any pack of text; see :class:`TextStream`."""

    corpus: Corpus
    order: SampleOrder
    sequence_length: int
    layout: Layout

    def pack_at(self, consumed: int) -> Arrays:
        """Microbatches of [B, S] each."""
        corpus, layout = self.corpus, self.layout
        samples = self.order.take(consumed + layout.rank * layout.share, layout.share)
        return [
            pack(corpus.tokens, corpus.starts, samples[begin : begin + layout.microbatch_size], self.sequence_length)
            for begin in range(0, layout.share, layout.microbatch_size)
        ]
