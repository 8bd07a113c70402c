"""Stream of sequences that are filled with whole documents, by best fit."""

from __future__ import annotations

from dataclasses import dataclass

from d9d_core.extend import DataContext, DataError, State

from d9d_data.config import ChatConfig, TextConfig
from d9d_data.corpus.prepare import Corpus
from d9d_data.order.layout import Layout
from d9d_data.order.samples import SampleOrder
from d9d_data.stream.base import CorpusStream, facts_of
from d9d_data.stream.bins import Bins, Pieces, best_fit, cut_pieces, pack_bins
from d9d_data.stream.reader import Arrays


class BinStream(CorpusStream):
    """Stream of samples with as many documents as fit; longer documents are several pieces.

    Bins are the same in every epoch; their order is drawn anew. A pack is the next ``batch_size`` bins of one global
    order, of which rank r of R takes the r-th of R equal runs.

    Raises:
        DataError: the batch is larger than the data.
    """

    def __init__(self, config: TextConfig | ChatConfig, context: DataContext, corpus: Corpus) -> None:
        layout = Layout.of(context)
        pieces = cut_pieces(corpus.starts, config.sequence_length)
        bins = best_fit(pieces.lengths, config.sequence_length)
        if layout.batch_size > len(bins):
            raise DataError(
                f"batch.size: a batch of {layout.batch_size} samples would hold documents several times, because "
                f"those of the {config.split} split fill {len(bins)} samples; use at most {len(bins)}, or more data"
            )
        context.note(f"packed into {len(bins):,} samples, of which {bins.unused:.1%} is padding")
        order = SampleOrder(len(bins), context.seed, config.shuffle)
        source = BinPacks(corpus, pieces, bins, order, config.sequence_length, layout)
        identity = f"best fit {corpus.digest} {config.sequence_length} {config.shuffle}"
        super().__init__(corpus, source, layout.batch_size, config.workers, identity, ("sequence_length", "shuffle"))
        self._source = source

    @property
    def facts(self) -> State:
        """Facts of the split (:func:`~d9d_data.stream.base.facts_of`), its samples, and their fraction of padding."""
        source = self._source
        return {
            **facts_of(self._corpus),
            "sequence_length": source.sequence_length,
            "samples": len(source.bins),
            "unused_positions": source.bins.unused,
        }


@dataclass(frozen=True, slots=True)
class BinPacks:
    """Source of one rank's part of any pack of bins; see :class:`BinStream`."""

    corpus: Corpus
    pieces: Pieces
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
                corpus.weights,
                self.pieces,
                self.bins,
                chosen[begin : begin + layout.microbatch_size],
                self.sequence_length,
                corpus.scales,
            )
            for begin in range(0, layout.share, layout.microbatch_size)
        ]
