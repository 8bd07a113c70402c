"""Stream of packed text, for the dataset ``text``."""

from __future__ import annotations

from dataclasses import dataclass

from d9d_core.extend import DataContext, DataError, State

from d9d_data.config import ChatConfig, TextConfig
from d9d_data.corpus.prepare import Corpus, prepare_for
from d9d_data.order.layout import Layout
from d9d_data.order.samples import SampleOrder
from d9d_data.stream.base import CorpusStream, facts_of
from d9d_data.stream.binned import BinStream
from d9d_data.stream.packing import pack, sample_count
from d9d_data.stream.reader import Arrays


def build_text(config: TextConfig, context: DataContext) -> TextStream | BinStream:
    """Prepare the corpus (once, then from the cache) and open its stream.

    Raises:
        DataError: the data or the sizes cannot be used; the text says what to change.
    """
    config, corpus = prepare_for(config, context)
    return (TextStream if config.packing == "concat" else BinStream)(config, context, corpus)


class TextStream(CorpusStream):
    """Stream of samples of equal length, cut from all documents in a row.

    A pack is the next ``batch_size`` samples of one global order. Rank r of R takes the r-th of R equal runs of it, cut
    into microbatches. So neither ranks nor microbatch size have a say in what is trained on when.
    """

    def __init__(self, config: TextConfig | ChatConfig, context: DataContext, corpus: Corpus) -> None:
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
        """Facts of the split (:func:`~d9d_data.stream.base.facts_of`), and its samples, which have no padding."""
        source = self._source
        return {
            **facts_of(self._corpus),
            "sequence_length": source.sequence_length,
            "samples": source.order.samples,
            "unused_positions": 0.0,
        }


@dataclass(frozen=True, slots=True)
class TextPacks:
    """Source of one rank's part of any pack of text; see :class:`TextStream`."""

    corpus: Corpus
    order: SampleOrder
    sequence_length: int
    layout: Layout

    def pack_at(self, consumed: int) -> Arrays:
        """Microbatches of [B, S] each."""
        corpus, layout = self.corpus, self.layout
        samples = self.order.take(consumed + layout.rank * layout.share, layout.share)
        return [
            pack(
                corpus.tokens,
                corpus.starts,
                samples[begin : begin + layout.microbatch_size],
                self.sequence_length,
                corpus.weights,
                corpus.scales,
            )
            for begin in range(0, layout.share, layout.microbatch_size)
        ]
