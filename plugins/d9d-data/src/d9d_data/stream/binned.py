"""Stream of sequences filled with whole documents, by best fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from d9d_core.data import DataContext
from d9d_core.errors import DataError
from d9d_core.types import State

from d9d_data.config import PackableConfig, TextConfig
from d9d_data.corpus.prepare import Corpus
from d9d_data.order.layout import Layout
from d9d_data.order.samples import SampleOrder
from d9d_data.stream.base import CorpusStream, facts_of
from d9d_data.stream.bins import Bins, Pieces, best_fit, cut_pieces, next_fit, pack_bins
from d9d_data.stream.one_pass import OnePassStream, one_pass_of
from d9d_data.stream.reader import Arrays, Lost


class BinStream(CorpusStream):
    """Stream of bins: each sample has as many documents as fit; longer documents are cut into several pieces.

    Every epoch has the same bins, in another random order unless ``shuffle`` is false. A pack, the samples of one step,
    has the next ``batch_size`` bins of one global order; rank r of R takes the r-th of R equal contiguous parts
    of the pack.

    Raises:
        DataError: the batch is larger than the data.
    """

    def __init__(self, config: TextConfig | PackableConfig, context: DataContext, corpus: Corpus) -> None:
        layout = Layout.of(context)
        pieces = cut_pieces(corpus.starts, config.sequence_length)
        bins = best_fit(pieces.lengths, config.sequence_length)
        if layout.batch_size > len(bins):
            raise DataError(
                f"batch.size: a batch of {layout.batch_size} samples would contain documents several times, because "
                f"the {config.split} split fills only {len(bins)} samples; use at most {len(bins)}, or more data"
            )
        context.note(f"packed into {len(bins):,} samples, of which {bins.unused:.1%} is padding")
        order = SampleOrder(len(bins), context.seed, config.shuffle)
        source = BinPacks(BinSamples(corpus, pieces, bins, config.sequence_length), order, layout)
        identity = f"best fit {corpus.digest} {config.sequence_length} {config.shuffle}"
        super().__init__(corpus, source, layout.batch_size, config.workers, identity, ("sequence_length", "shuffle"))
        self._source = source

    @property
    def facts(self) -> State:
        """Facts of the split (:func:`~d9d_data.stream.base.facts_of`), its samples, and their fraction of padding."""
        source = self._source.samples
        return {
            **facts_of(self._corpus),
            "sequence_length": source.sequence_length,
            "samples": len(source.bins),
            "unused_positions": source.bins.unused,
        }


def one_pass_of_bins(config: TextConfig | PackableConfig, context: DataContext, corpus: Corpus) -> OnePassStream:
    """Open a stream of bins for one pass: samples are filled with whole documents in their order.

    Documents longer than a sample are truncated to their first positions; the fact ``cut_documents`` is their number.

    Raises:
        DataError: there are no documents, or ``batch.size`` or ``sequence_length`` does not fit the data.
    """
    length = config.sequence_length
    tokens = np.diff(corpus.starts)
    positions = tokens - corpus.ends.no_inputs
    if not corpus.predicts and (positions > length).any():
        raise DataError(
            f"data.packing: {int((positions > length).sum()):,} rows are longer than {length} positions, and packing "
            "truncates them differently from the data that the head is trained with; use the dataset documents, or "
            "longer samples"
        )
    lengths = np.minimum(positions, length)
    pieces = Pieces(np.asarray(corpus.starts[:-1]), lengths, np.minimum(lengths, tokens - 1))
    bins = next_fit(np.maximum(pieces.lengths, 1), length)
    source = BinSamples(corpus, pieces, bins, length)
    facts = {"packed": True, "unused_positions": bins.unused}
    identity = f"bins in order {corpus.digest} {length}"
    # All samples have equal length, so sorting would change nothing.
    sizes = (len(bins), len(positions))
    return one_pass_of(corpus, source, sizes, config, context, identity, facts, context.microbatch_size)


@dataclass(frozen=True, slots=True)
class BinSamples:
    """Source of arbitrary bins as microbatches [B, S]."""

    corpus: Corpus
    pieces: Pieces
    bins: Bins
    sequence_length: int

    def sizes(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Lengths [B] of samples, all equal."""
        return np.full(len(samples), self.sequence_length)

    def lost(self, samples: npt.NDArray[np.int64]) -> Lost:
        """Number of tokens lost to truncation by the document of each piece in samples [B]: one list per sample."""
        rows = []
        for sample in samples.tolist():
            members = self.bins.members[self.bins.starts[sample] : self.bins.starts[sample + 1]]
            documents = np.searchsorted(self.corpus.starts, self.pieces.firsts[members], side="right") - 1
            rows.append(self.corpus.lost_of(documents).tolist())
        return rows

    def microbatch(self, samples: npt.NDArray[np.int64]) -> Mapping[str, npt.NDArray[Any]]:
        """Microbatch of bins [B], with ``rows`` and ``ends``.

        ``rows`` [B] is the index of each bin's first document; ``ends`` [B, N], for at most N documents per bin, is the
        position after each document, and 0 for documents that a bin lacks.
        """
        starts = self.bins.starts
        counts = starts[samples + 1] - starts[samples]
        ends = np.zeros((len(samples), int(counts.max())), dtype=np.int64)
        for place, (sample, count) in enumerate(zip(samples.tolist(), counts.tolist(), strict=True)):
            members = self.bins.members[starts[sample] : starts[sample + 1]]
            ends[place, :count] = np.maximum(self.pieces.lengths[members], 1).cumsum()
        return {**self.packed(samples), "rows": self.bins.members[starts[samples]], "ends": ends}

    def packed(self, samples: npt.NDArray[np.int64]) -> Mapping[str, npt.NDArray[Any]]:
        """Microbatch of bins [B], without the further fields of one pass (``rows`` and ``ends``)."""
        corpus, length = self.corpus, self.sequence_length
        return pack_bins(corpus.tokens, corpus.weights, self.pieces, self.bins, samples, length, corpus.scales)


@dataclass(frozen=True, slots=True)
class BinPacks:
    """Source of one rank's share of any pack (samples of a step) of bins; see :class:`BinStream`."""

    samples: BinSamples
    order: SampleOrder
    layout: Layout

    def pack_at(self, consumed: int) -> Arrays:
        """Microbatches [B, S] of a pack, the samples of one step."""
        return [self.samples.packed(chosen) for chosen in self._chosen(consumed)]

    def lost_at(self, consumed: int) -> Sequence[Lost]:
        """Number of tokens that each document in the pack's rows lost to truncation, by microbatch."""
        return [self.samples.lost(chosen) for chosen in self._chosen(consumed)]

    def _chosen(self, consumed: int) -> Iterator[npt.NDArray[np.int64]]:
        """Yield the samples [B] of each microbatch."""
        layout = self.layout
        chosen = self.order.take(consumed + layout.rank * layout.share, layout.share)
        for begin in range(0, layout.share, layout.microbatch_size):
            yield chosen[begin : begin + layout.microbatch_size]
