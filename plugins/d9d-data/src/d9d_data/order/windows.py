"""Order in which each pack (the samples of one step) has samples of similar length.

Packs are formed within an epoch of the sample order, except for one pack across the end of the epoch. They are formed
in windows: the next W samples, or the remaining samples of the epoch, are sorted by length and cut into packs, and the
packs are shuffled. At any time, the numbers of times that any two samples were used differ by at most one; each pack is
a function of the number of consumed samples alone; and no sample is left out.

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
    """Order by windows: assigns samples to packs, sorted by length inside a window. Can be pickled.

    Args:
        order: order of the samples before sorting.
        corpus: corpus with the documents of the samples.
        longest: limit of the lengths to compare; longer documents count as this length.
        window: W, a multiple of ``batch_size``.
        batch_size: b, at most the number of samples.

    Raises:
        ValueError: the window is not a multiple of the batch size, or the batch is larger than the number of samples.
    """

    def __init__(self, order: SampleOrder, corpus: Corpus, longest: int, window: int, batch_size: int) -> None:
        if window % batch_size:
            raise ValueError(
                f"the window of {window} samples is not a multiple of the batch size {batch_size}; use a multiple"
            )
        if batch_size > order.samples:
            raise ValueError(
                f"the batch size {batch_size} is larger than the number of samples, {order.samples}; lower it"
            )
        self.order = order
        self.window = window
        self._corpus = corpus
        self._longest = longest
        self._batch_size = batch_size
        # Epoch, window and samples of the last call, because consecutive calls ask for packs of the same window.
        self._recent: tuple[tuple[int, int], Int64] | None = None

    def __call__(self, consumed: int) -> Int64:
        """Samples of the pack after ``consumed`` samples: int64 [b], the shortest first."""
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
        """Make an order of the same samples with another window and another batch size."""
        return WindowOrder(self.order, self._corpus, self._longest, window, batch_size)

    def holds_a_beginning(self, consumed: int) -> bool:
        """Whether the packs up to ``consumed`` contain exactly the first ``consumed`` samples of the unsorted order."""
        size, samples = self._batch_size, self.order.samples
        epoch, place = divmod(consumed, samples)
        if consumed % size or not place:
            return not consumed % size
        within = place - self._begun(epoch)
        ends = within % self.window == 0 or samples - place < size
        return ends and place >= size  # earlier, samples may have moved, see _take()

    def _begun(self, epoch: int) -> int:
        """Number of samples of an epoch in the pack that began in the previous epoch."""
        return -epoch * self.order.samples % self._batch_size

    def _take(self, epoch: int, first: int, count: int) -> Int64:
        """Samples at positions ``first`` to ``first + count`` (exclusive) of an epoch.

        If a pack crosses the beginning of the epoch, the epoch's first b samples are rearranged so that no sample is
        twice in this pack. Epochs of less than two packs are not rearranged.
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
        # The longest document of a sample determines the padding.
        lengths = corpus.positions_of(corpus.documents_of(samples)).reshape(len(samples), -1).max(axis=1)
        lengths = np.minimum(lengths, self._longest)
        # Stable: samples of equal length keep the random order of the seed.
        return samples[np.argsort(lengths, kind="stable")]
