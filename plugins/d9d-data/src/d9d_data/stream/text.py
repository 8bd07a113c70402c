"""Stream of packed text, for the dataset ``text`` and for packed conversations and records of token ids."""

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
from d9d_data.corpus.fit import TOLERATED
from d9d_data.corpus.prepare import Corpus, prepare_for
from d9d_data.order.layout import Layout
from d9d_data.order.samples import SampleOrder
from d9d_data.stream.base import CorpusStream, facts_of
from d9d_data.stream.binned import BinStream, one_pass_of_bins
from d9d_data.stream.one_pass import OnePassStream, one_pass_of
from d9d_data.stream.packing import pack, sample_count
from d9d_data.stream.reader import Arrays, Lost


def build_text(config: TextConfig, context: DataContext) -> TextStream | BinStream | OnePassStream:
    """Prepare the corpus (once, then from the cache) and open its stream.

    Raises:
        DataError: the data or the batch size is invalid; the message says how to correct it.
    """
    config, corpus = prepare_for(config, context)
    return open_text(config, context, corpus)


def open_text(
    config: TextConfig | PackableConfig, context: DataContext, corpus: Corpus
) -> TextStream | BinStream | OnePassStream:
    """Open a stream of packed samples over a prepared corpus, endless or for one pass.

    Raises:
        DataError: batch size or sequence length does not fit the data; the message says how to correct it.
    """
    if config.packing != "concat":
        return (one_pass_of_bins if context.one_pass else BinStream)(config, context, corpus)
    if not context.one_pass:
        return TextStream(config, context, corpus)
    samples = _count(config, context, corpus)
    source = TextSamples(corpus, config.sequence_length)
    identity = f"concat {corpus.digest} {config.sequence_length}"
    unused = {"unused_tokens": _unused(corpus, samples, config.sequence_length)}
    # All samples have equal length, so sorting would change nothing.
    return one_pass_of(corpus, source, (samples, samples), config, context, identity, unused, context.microbatch_size)


def _count(config: TextConfig | PackableConfig, context: DataContext, corpus: Corpus) -> int:
    """Number of samples of a corpus; warns if many tokens are in no sample.

    Raises:
        DataError: the corpus is too small for one sample.
    """
    tokens = len(corpus.tokens)
    samples = sample_count(tokens, config.sequence_length)
    if samples == 0:
        raise DataError(
            f"data.sequence_length: {config.sequence_length} positions need {config.sequence_length + 1} tokens, "
            f"but the {config.split} split has {tokens}; use at most {tokens - 1}, or more text"
        )
    left = _unused(corpus, samples, config.sequence_length)
    if left > TOLERATED * tokens:
        context.note(
            f"warning: the last {left:,} of {tokens:,} tokens do not fill a sample, and are not used; use a smaller "
            "sequence_length, or packing: best_fit"
        )
    return samples


def _unused(corpus: Corpus, samples: int, sequence_length: int) -> int:
    """Number of tokens at the end of a corpus that are in no sample."""
    return len(corpus.tokens) - 1 - samples * sequence_length


class TextStream(CorpusStream):
    """Stream of text: samples of equal length, cut from all documents concatenated.

    A pack, the samples of one step, has the next ``batch_size`` samples of one global order. Rank r of R takes the r-th
    of R equal contiguous parts of the pack, cut into microbatches. The order of the samples depends neither on the
    number of ranks nor on the microbatch size.
    """

    def __init__(self, config: TextConfig | PackableConfig, context: DataContext, corpus: Corpus) -> None:
        layout = Layout.of(context)
        order = SampleOrder(_count(config, context, corpus), context.seed, config.shuffle)
        source = TextPacks(TextSamples(corpus, config.sequence_length), order, layout)
        identity = f"{corpus.digest} {config.sequence_length} {config.shuffle}"
        super().__init__(corpus, source, layout.batch_size, config.workers, identity, ("sequence_length", "shuffle"))
        self._source = source

    @property
    def facts(self) -> State:
        """Facts of the split (:func:`~d9d_data.stream.base.facts_of`), and facts of its samples, which have no padding.

        ``unused_tokens`` is the number of tokens at the end of the corpus that do not fill a sample.
        """
        source = self._source
        return {
            **facts_of(self._corpus),
            "sequence_length": source.samples.sequence_length,
            "samples": source.order.samples,
            "unused_positions": 0.0,
            "unused_tokens": _unused(self._corpus, source.order.samples, source.samples.sequence_length),
        }


@dataclass(frozen=True, slots=True)
class TextSamples:
    """Source of arbitrary samples of text as microbatches [B, S]."""

    corpus: Corpus
    sequence_length: int

    def sizes(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Lengths [B] of samples, all equal."""
        return np.full(len(samples), self.sequence_length)

    def lost(self, samples: npt.NDArray[np.int64]) -> Lost:
        """Number of tokens that each document in samples [B] lost to truncation: one list per sample."""
        starts, rows = self.corpus.starts, []
        for first in (samples * self.sequence_length).tolist():
            begin, last = np.searchsorted(starts, (first, first + self.sequence_length - 1), side="right") - 1
            rows.append(self.corpus.lost_of(np.arange(begin, last + 1)).tolist())
        return rows

    def microbatch(self, samples: npt.NDArray[np.int64]) -> Mapping[str, npt.NDArray[Any]]:
        """Microbatch of samples [B], with ``rows``."""
        return {**self.packed(samples), "rows": samples}

    def packed(self, samples: npt.NDArray[np.int64]) -> Mapping[str, npt.NDArray[Any]]:
        """Microbatch of samples [B], without ``rows``."""
        corpus = self.corpus
        return pack(corpus.tokens, corpus.starts, samples, self.sequence_length, corpus.weights, corpus.scales)


@dataclass(frozen=True, slots=True)
class TextPacks:
    """Source of one rank's share of any pack (samples of a step) of text; see :class:`TextStream`."""

    samples: TextSamples
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
