"""The stream of packs that training reads."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from d9d_core.errors import DataError
from d9d_core.protocols import DataContext, Pack, State

from d9d_data.config import TextConfig
from d9d_data.corpus import Corpus, prepare
from d9d_data.order import SampleOrder
from d9d_data.packing import pack, sample_count


def build_text(config: TextConfig, context: DataContext) -> TextStream:
    """Prepare the corpus (once, then from the cache) and open its stream.

    Raises:
        DataError: the data or the sizes cannot be used; the text says what to change.
    """
    return TextStream(config, context, prepare(config, context.cache_dir, context.note))


class TextStream:
    """An endless stream of packed samples; see :class:`d9d_core.protocols.DataStream`.

    A pack is the next ``batch_size`` samples of one global order. Rank r of R takes the r-th of R equal runs of it, cut
    into microbatches. So neither ranks nor microbatch size have a say in what is trained on when.
    """

    def __init__(self, config: TextConfig, context: DataContext, corpus: Corpus) -> None:
        _check_batch(context)
        tokens = len(corpus.tokens)
        samples = sample_count(tokens, config.sequence_length)
        if samples == 0:
            raise DataError(
                f"data.sequence_length: {config.sequence_length} positions need {config.sequence_length + 1} tokens, "
                f"but the {config.split} split has {tokens}; use at most {tokens - 1}, or more text"
            )
        self._sequence_length = config.sequence_length
        self._context = context
        self._corpus = corpus
        self._order = SampleOrder(samples, context.seed, config.shuffle)
        self._consumed = 0
        identity = f"{corpus.digest} {config.sequence_length} {config.shuffle}"
        self._fingerprint = hashlib.sha256(identity.encode()).hexdigest()[:16]

    @property
    def facts(self) -> State:
        """Sizes of this split, and the entropy (nats per token) of the train split's token frequencies."""
        return {
            "vocab_size": self._corpus.vocab_size,
            "sequence_length": self._sequence_length,
            "tokens": len(self._corpus.tokens),
            "documents": len(self._corpus.starts) - 1,
            "samples": self._order.samples,
            "unigram_entropy": self._corpus.unigram_entropy,
            "tokenizer": self._corpus.tokenizer,
        }

    def next_pack(self) -> Pack:
        """This rank's microbatches of the next step: int64 CPU tensors [B, S] by the names of language modelling."""
        context = self._context
        share = context.batch_size // context.ranks
        samples = self._order.take(self._consumed + context.rank * share, share)
        self._consumed += context.batch_size
        corpus, size = self._corpus, context.microbatch_size
        return [
            {
                name: torch.from_numpy(values)
                for name, values in pack(
                    corpus.tokens, corpus.starts, samples[begin : begin + size], self._sequence_length
                ).items()
            }
            for begin in range(0, share, size)
        ]

    def state(self) -> State:
        """Samples consumed by all ranks together, and what identifies the data."""
        return {"consumed": self._consumed, "fingerprint": self._fingerprint}

    def load_state(self, state: State) -> None:
        """Continue at ``state``; batch size, ranks and microbatch size may differ from those it was saved with.

        Raises:
            DataError: the state belongs to other data.
        """
        consumed, fingerprint = state.get("consumed"), state.get("fingerprint")
        if fingerprint != self._fingerprint:
            raise DataError(
                f"the checkpoint's data position belongs to other data (its fingerprint is {fingerprint}, now it is "
                f"{self._fingerprint}); the contents of the sources, tokenizer, split, held_out, sequence_length and "
                "shuffle must be as they were; to train on other data, start a new run from the saved weights"
            )
        if not isinstance(consumed, int) or consumed < 0:
            raise DataError(
                f"the checkpoint's data position is damaged: consumed is {consumed!r}; use another checkpoint"
            )
        self._consumed = consumed

    def save_assets(self, directory: Path) -> None:
        """Write ``tokenizer.json`` and ``tokenizer_config.json`` as transformers reads them."""
        self._corpus.save_assets(directory)


def _check_batch(context: DataContext) -> None:
    if context.batch_size % (context.ranks * context.microbatch_size):
        unit = context.ranks * context.microbatch_size
        below = context.batch_size // unit * unit
        options = " or ".join(str(size) for size in (below, below + unit) if size)
        raise DataError(
            f"a batch of {context.batch_size} samples cannot be divided over {context.ranks} data-parallel ranks in "
            f"microbatches of {context.microbatch_size}: it must be a multiple of {unit}; use {options}, or another "
            "microbatch size"
        )
