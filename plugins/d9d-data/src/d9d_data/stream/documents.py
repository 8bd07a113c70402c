"""Stream of samples of whole documents, for datasets that pad; samples of a step (a pack) have similar lengths."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from d9d_core.data import DataContext
from d9d_core.errors import DataError
from d9d_core.types import State

from d9d_data.config import DocumentsConfig, LabelledConfig, PaddedConfig, PairsConfig
from d9d_data.corpus.prepare import Corpus, prepare_for
from d9d_data.order.layout import Layout
from d9d_data.order.samples import SampleOrder
from d9d_data.order.windows import WindowOrder
from d9d_data.stream.base import CorpusStream, facts_of
from d9d_data.stream.one_pass import OnePassStream, one_pass_of
from d9d_data.stream.padding import pad, pad_texts
from d9d_data.stream.reader import Arrays, Lost

# Default number of batches sorted together, enough that the lengths in a pack differ little.
_WINDOW_BATCHES = 64


def build_documents(
    config: DocumentsConfig | LabelledConfig | PairsConfig, context: DataContext
) -> DocumentStream | OnePassStream:
    """Prepare the corpus (once, then from the cache) and open its stream.

    Raises:
        DataError: the data or the batch size is invalid; the message says how to correct it.
    """
    return open_documents(config, context, prepare_for(config, context)[1])


def open_documents(config: PaddedConfig, context: DataContext, corpus: Corpus) -> DocumentStream | OnePassStream:
    """Open the stream of a prepared corpus, endless or for one pass.

    Raises:
        DataError: batch size, sequence length or window does not fit the data; the message says how to correct it.
    """
    if not context.one_pass:
        return DocumentStream(config, context, corpus)
    source = DocumentSamples(corpus, config.sequence_length, config.pad_multiple)
    identity = f"documents {corpus.digest} {config.sequence_length}"
    rows = corpus.samples * corpus.documents_per_sample
    return one_pass_of(corpus, source, (corpus.samples, rows), config, context, identity, {}, config.bucket_window)


class DocumentStream(CorpusStream):
    """Stream of documents, each a sample; a pack, the samples of one step, has samples of similar length.

    Packs are formed globally, see :mod:`~d9d_data.order.windows`. The samples of a pack, in order of length, are dealt
    to the ranks in turn: all ranks get the same number, and their n-th microbatches have similar lengths.

    The packs depend on the batch size and the window. A run can be resumed with another batch size or window only from
    a state at the end of a window, where the old and the new sizes have consumed the same samples.

    Raises:
        DataError: the batch is larger than the data, or the window does not fit batch size or data.
    """

    def __init__(self, config: PaddedConfig, context: DataContext, corpus: Corpus) -> None:
        layout = Layout.of(context)
        samples = corpus.samples
        if layout.batch_size > samples:
            raise DataError(
                f"batch.size: a batch of {layout.batch_size} samples would have documents several times, because the "
                f"{config.split} split has only {samples}; use at most {samples}, or more data"
            )
        order = SampleOrder(samples, context.seed, config.shuffle)
        window = _window(config.bucket_window, samples, layout.batch_size)
        windows = WindowOrder(order, corpus, config.sequence_length, window, layout.batch_size)
        source = DocumentPacks(DocumentSamples(corpus, config.sequence_length, config.pad_multiple), windows, layout)
        identity = f"documents by epoch {corpus.digest} {config.sequence_length} {config.shuffle}"
        super().__init__(corpus, source, layout.batch_size, config.workers, identity, ("sequence_length", "shuffle"))
        self._sequence_length = config.sequence_length
        self._window = window
        self._order = windows
        self._unused = source.unused(window)
        context.note(f"about {self._unused:.1%} of the positions are padding")

    @property
    def facts(self) -> State:
        """Facts of the split before truncation (:func:`~d9d_data.stream.base.facts_of`), and facts of its samples.

        ``unused_positions`` is the fraction of padding in the packs of the first window.
        """
        return {
            **facts_of(self._corpus),
            "sequence_length": self._sequence_length,
            "samples": self._corpus.samples,
            "bucket_window": self._window,
            "unused_positions": self._unused,
        }

    def state(self) -> State:
        """State of the base class, and the batch size and window, on which the packs depend."""
        return {**super().state(), "batch_size": self._batch_size, "bucket_window": self._window}

    def load_state(self, state: State) -> None:
        """Continue at ``state``; ranks, microbatch size and workers may differ from the saved run.

        Raises:
            DataError: the state belongs to other data, is damaged, or is inside a window and the batch size or the
                window differs.
        """
        before = self._consumed
        super().load_state(state)
        sizes = (state.get("batch_size"), state.get("bucket_window"))
        if sizes == (self._batch_size, self._window):
            return
        consumed, self._consumed = self._consumed, before
        batch_size, window = sizes
        if not isinstance(batch_size, int) or not isinstance(window, int) or not self._possible(window, batch_size):
            raise DataError(
                f"the checkpoint's data position is damaged: batch_size is {batch_size!r} and bucket_window "
                f"{window!r}; use another checkpoint"
            )
        before_it = self._order.of_sizes(window, batch_size)
        if not (before_it.holds_a_beginning(consumed) and self._order.holds_a_beginning(consumed)):
            raise DataError(
                f"the checkpoint was saved after {consumed} samples with a batch size of {batch_size} and a "
                f"bucket_window of {window}; with a batch size of {self._batch_size} and a bucket_window of "
                f"{self._window}, some samples nearby would be repeated and others left out. Keep both unchanged, or "
                "change them where a window ends with the old sizes and with the new ones, such as at the end of an "
                f"epoch whose {self._order.order.samples} samples are a multiple of both batch sizes"
            )
        self._consumed = consumed

    def _possible(self, window: int, batch_size: int) -> bool:
        return 0 < batch_size <= min(window, self._order.order.samples) and window % batch_size == 0


@dataclass(frozen=True, slots=True)
class DocumentSamples:
    """Source of arbitrary documents as microbatches [B, S]; S differs between microbatches."""

    corpus: Corpus
    sequence_length: int
    pad_multiple: int

    def lengths(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Number of positions of each document of samples [b]: [b, documents per sample]."""
        positions = self.corpus.positions_of(self.corpus.documents_of(samples))
        return np.clip(positions, 1, self.sequence_length).reshape(len(samples), -1)

    def sizes(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Number of positions of each sample's longest document: [b]."""
        longest: npt.NDArray[np.int64] = self.lengths(samples).max(axis=1)
        return longest

    def lost(self, samples: npt.NDArray[np.int64]) -> Lost:
        """Number of tokens that the documents of samples [b] lost to truncation, one row per document."""
        return [[lost] for lost in self.corpus.lost_of(self.corpus.documents_of(samples)).tolist()]

    def microbatch(self, samples: npt.NDArray[np.int64]) -> Mapping[str, npt.NDArray[Any]]:
        """Microbatch of samples [b], with ``rows``.

        A sample of several documents has consecutive rows, and ``samples`` [b] holds the indices of the samples.
        """
        return {**self.padded(samples), "rows": self.corpus.documents_of(samples)}

    def padded(self, samples: npt.NDArray[np.int64]) -> Mapping[str, npt.NDArray[Any]]:
        """Microbatch of samples [b], padded to the longest, without ``rows``."""
        corpus = self.corpus
        sizes = (corpus.documents_of(samples), self.sequence_length, self.pad_multiple)
        if corpus.predicts:
            padded = pad(corpus.tokens, corpus.starts, *sizes, corpus.weights, corpus.scales)
        else:
            each = corpus.encoding.settings.get("per") == "word"
            padded = pad_texts(corpus.tokens, corpus.starts, *sizes, corpus.labels, corpus.ends, label_each=each)
        return {**padded, "samples": samples} if corpus.texts else padded


@dataclass(frozen=True, slots=True)
class DocumentPacks:
    """Source of one rank's share of any pack (samples of a step) of documents; see :class:`DocumentStream`."""

    samples: DocumentSamples
    order: WindowOrder
    layout: Layout

    def unused(self, samples: int) -> float:
        """Fraction of padding tokens in the first samples of the order.

        Args:
            samples: number of samples of all ranks together, a multiple of the batch size.
        """
        layout, multiple = self.layout, self.samples.pad_multiple
        used = padded = 0
        for consumed in range(0, samples, layout.batch_size):
            dealt = self.order(consumed).reshape(-1, layout.ranks).T.reshape(-1)  # grouped by rank, as in pack_at()
            lengths = self.samples.lengths(dealt)
            rows = lengths.reshape(-1, layout.microbatch_size * lengths.shape[1])
            longest = -(-rows.max(axis=1) // multiple) * multiple
            used, padded = used + int(lengths.sum()), padded + int(longest.sum()) * rows.shape[1]
        return 1 - used / padded

    def pack_at(self, consumed: int) -> Arrays:
        """Microbatches [B, S] of a pack (the samples of a step), the shortest first; S differs between microbatches."""
        return [self.samples.padded(chosen) for chosen in self._chosen(consumed)]

    def lost_at(self, consumed: int) -> Sequence[Lost]:
        """Number of tokens that each document in the pack's rows lost to truncation, by microbatch."""
        return [self.samples.lost(chosen) for chosen in self._chosen(consumed)]

    def _chosen(self, consumed: int) -> Iterator[npt.NDArray[np.int64]]:
        """Yield the samples [b] of each microbatch."""
        layout = self.layout
        mine = self.order(consumed)[layout.rank :: layout.ranks]
        for begin in range(0, layout.share, layout.microbatch_size):
            yield mine[begin : begin + layout.microbatch_size]


def _window(wanted: int | None, samples: int, batch_size: int) -> int:
    """Number of samples of a window: a multiple of the batch size, and at most an epoch."""
    most = samples // batch_size * batch_size
    if wanted is None:
        return min(most, _WINDOW_BATCHES * batch_size)
    if wanted % batch_size:
        below = wanted // batch_size * batch_size
        options = " or ".join(str(size) for size in (below, below + batch_size) if 0 < size <= most)
        raise DataError(
            f"data.bucket_window: {wanted} samples cannot be cut into batches of {batch_size}; use {options or most}"
        )
    if wanted > most:
        raise DataError(
            f"data.bucket_window: {wanted} samples are more than the {samples} of an epoch, so a pack would have the "
            f"same document several times; use at most {most}"
        )
    return wanted
