"""Streams of conversations, for the dataset ``chat``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from d9d_core.extend import DataContext, DataError, State

from d9d_data.chat.template import ChatTemplate
from d9d_data.config import ChatConfig, ModelTextConfig
from d9d_data.corpus.prepare import Corpus, prepare_for
from d9d_data.order.layout import Layout
from d9d_data.order.samples import SampleOrder
from d9d_data.stream.base import CorpusStream
from d9d_data.stream.bins import Bins, best_fit, pack_bins
from d9d_data.stream.documents import DocumentStream
from d9d_data.stream.reader import Arrays
from d9d_data.tokenizer.file import find_tokenizer_file


def build_chat(config: ChatConfig, context: DataContext) -> ConversationStream | PackedConversationStream:
    """Prepare the conversations (once, then from the cache) and open their stream.

    Raises:
        DataError: the data, the template or the sizes cannot be used; the text says what to change.
    """
    config, corpus = prepare_for(config, context)
    warn_of_dates(config, context.note)
    return (ConversationStream if config.packing == "none" else PackedConversationStream)(config, context, corpus)


def warn_of_dates(config: ModelTextConfig, note: Callable[[str], None]) -> None:
    """Say so where the template renders the date."""
    assert config.tokenizer is not None
    template = ChatTemplate.find(find_tokenizer_file(config.tokenizer), arguments=config.template_arguments)
    if template is not None and template.depends_on_date:
        note(f"warning: {template.name} renders today's date; what is prepared keeps the date of its preparation")


class ConversationStream(DocumentStream):
    """Stream of conversations, each a sample; a pack has samples of similar length."""

    @property
    def facts(self) -> State:
        """Sizes of this split, and how much of it is learned."""
        facts = {name: fact for name, fact in super().facts.items() if name not in {"cut_documents", "unigram_entropy"}}
        return {**facts, **learned_facts(self._corpus)}


class PackedConversationStream(CorpusStream):
    """Stream of conversations, as many in a sample as fit.

    Bins are the same in every epoch; their order is drawn anew. A pack is the next ``batch_size`` bins of one global
    order, of which rank r of R takes the r-th of R equal runs.
    """

    def __init__(self, config: ChatConfig, context: DataContext, corpus: Corpus) -> None:
        layout = Layout.of(context)
        bins = best_fit(np.diff(corpus.starts) - 1, config.sequence_length)
        if layout.batch_size > len(bins):
            raise DataError(
                f"batch.size: a batch of {layout.batch_size} samples would hold conversations several times, because "
                f"those of the {config.split} split fill {len(bins)} samples; use at most {len(bins)}, or more data"
            )
        order = SampleOrder(len(bins), context.seed, config.shuffle)
        source = BinPacks(corpus, bins, order, config.sequence_length, layout)
        identity = f"best fit {corpus.digest} {config.sequence_length} {config.shuffle}"
        super().__init__(corpus, source, layout.batch_size, config.workers, identity, ("sequence_length", "shuffle"))
        self._source = source

    @property
    def facts(self) -> State:
        """Sizes of this split, how much of it is learned, and the fraction of positions that packing leaves empty."""
        source, corpus = self._source, self._corpus
        return {
            "vocab_size": corpus.vocab_size,
            "sequence_length": source.sequence_length,
            "tokens": len(corpus.tokens),
            "documents": len(corpus.starts) - 1,
            "samples": len(source.bins),
            "unused_positions": source.bins.unused,
            "tokenizer": corpus.tokenizer,
            **learned_facts(corpus),
        }


@dataclass(frozen=True, slots=True)
class BinPacks:
    """Source of one rank's part of any pack of bins; see :class:`PackedConversationStream`."""

    corpus: Corpus
    bins: Bins
    order: SampleOrder
    sequence_length: int
    layout: Layout

    def pack_at(self, consumed: int) -> Arrays:
        """Microbatches of [B, S] each."""
        corpus, layout = self.corpus, self.layout
        chosen = self.order.take(consumed + layout.rank * layout.share, layout.share)
        return [
            pack_bins(
                corpus.tokens,
                corpus.starts,
                corpus.weights,
                self.bins,
                chosen[begin : begin + layout.microbatch_size],
                self.sequence_length,
            )
            for begin in range(0, layout.share, layout.microbatch_size)
        ]


def learned_facts(corpus: Corpus) -> State:
    """Tokens that are learned, and conversations that were left out."""
    assert corpus.weights is not None
    left_out = {"dropped": corpus.dropped} if corpus.dropped else {}
    return {"learned_tokens": int(np.count_nonzero(corpus.weights)), **left_out}
