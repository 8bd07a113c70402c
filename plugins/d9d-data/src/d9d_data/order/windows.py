"""Order of packs of similar length.

Packs lie within an epoch of the order of samples, but for one that spans its end. The packs within are formed in
windows: the next W samples, or as many as the epoch has left, are sorted by length, cut into packs, and the packs are
shuffled. So at any time each sample has come as often as any other or once more, in a pack of samples of about its
length, and any pack is computed from the number of consumed samples alone. Nothing is left over.

Shapes: b samples of a pack.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from d9d_data.corpus.prepare import Corpus
from d9d_data.order.permutation import Permutation
from d9d_data.order.samples import SampleOrder

Int64 = npt.NDArray[np.int64]


class WindowOrder:
    """Order by windows: assignment of samples to packs, sorted inside a window. Can be sent to another process.

    Args:
        order: order of samples before they are sorted.
        corpus: has the documents that the samples are.
        longest: documents of more positions count as of this length.
        window: W, a multiple of ``batch_size``.
        batch_size: b, at most the number of samples.
    """

    def __init__(self, order: SampleOrder, corpus: Corpus, longest: int, window: int, batch_size: int) -> None:
        if window % batch_size:
            raise ValueError(f"a window of {window} samples cannot be cut into packs of {batch_size}")
        if batch_size > order.samples:
            raise ValueError(f"a pack of {batch_size} samples cannot be formed of {order.samples}")
        self.order = order
        self.window = window
        self._corpus = corpus
        self._longest = longest
        self._batch_size = batch_size
        # The packs of a window are asked for one after another.
        self._recent: tuple[tuple[int, int], Int64] | None = None

    def __call__(self, consumed: int) -> Int64:
        """Samples of the pack that comes after ``consumed`` others: int64 [b], the shortest first."""
        size, samples = self._batch_size, self.order.samples
        epoch, place = divmod(consumed, samples)
        left = samples - place
        if left < size:
            return self._sorted(np.concatenate([self._take(epoch, place, left), self._take(epoch + 1, 0, size - left)]))
        first = self._begun(epoch)
        window, within = divmod(place - first, self.window)
        packs = min(self.window, (samples - first) // size * size - window * self.window) // size
        pack = within // size
        if self.order.shuffle:
            order = Permutation(packs, f"seed {self.order.seed} packs of window {window} of epoch {epoch}")
            pack = int(order(np.asarray([pack]))[0])
        if self._recent is None or self._recent[0] != (epoch, window):
            taken = self._take(epoch, first + window * self.window, packs * size)
            self._recent = ((epoch, window), self._sorted(taken))
        return self._recent[1][pack * size : (pack + 1) * size]

    def of_sizes(self, window: int, batch_size: int) -> WindowOrder:
        """Order of the same samples in packs of other sizes."""
        return WindowOrder(self.order, self._corpus, self._longest, window, batch_size)

    def holds_a_beginning(self, consumed: int) -> bool:
        """Whether the packs so far hold just the first ``consumed`` samples of the order, in whatever order."""
        size, samples = self._batch_size, self.order.samples
        epoch, place = divmod(consumed, samples)
        if consumed % size or not place:
            return not consumed % size
        within = place - self._begun(epoch)
        ends = within % self.window == 0 or samples - place < size
        return ends and place >= size  # before, samples have changed places, see _take()

    def _begun(self, epoch: int) -> int:
        """Samples of an epoch that are in the pack which began in the epoch before."""
        return -epoch * self.order.samples % self._batch_size

    def _take(self, epoch: int, first: int, count: int) -> Int64:
        """Samples at some places of an epoch.

        If a pack spans the epoch's beginning, the first b are arranged so that no sample is in that pack twice. In an
        epoch of less than two packs this is left to chance.
        """
        start, size, begun = epoch * self.order.samples, self._batch_size, self._begun(epoch)
        taken = self.order.take(start + first, count)
        if begun and first < size and self.order.samples >= 2 * size:
            before = self.order.take(start - (size - begun), size - begun)
            beginning = self.order.take(start, size)
            twice = np.isin(beginning, before)
            arranged = np.concatenate([beginning[~twice], beginning[twice]])[first : first + count]
            taken[: len(arranged)] = arranged
        return taken

    def _sorted(self, samples: Int64) -> Int64:
        corpus = self._corpus
        # The longest document of a sample decides how much is padded.
        lengths = corpus.positions_of(corpus.documents_of(samples)).reshape(len(samples), -1).max(axis=1)
        lengths = np.minimum(lengths, self._longest)
        # Stable: samples of one length stay in the order that the seed gave them.
        return samples[np.argsort(lengths, kind="stable")]
