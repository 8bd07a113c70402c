"""Order of packs of similar length.

A window is the next W samples of the endless order of samples. It is sorted by length, cut into packs, and the packs
are shuffled. So every sample comes as often as in that order, in a pack of samples of about its length, and any pack is
computed from the number of consumed samples alone. Windows run across the ends of epochs: nothing is left over.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from d9d_data.corpus.prepare import Corpus
from d9d_data.order.permutation import Permutation
from d9d_data.order.samples import SampleOrder

Int64 = npt.NDArray[np.int64]


class WindowOrder:
    """Assignment of samples to packs. Can be sent to another process.

    Args:
        order: order of samples before they are sorted.
        corpus: has the documents that the samples are.
        longest: documents of more tokens count as of this length.
        window: W, a multiple of ``batch_size``.
        batch_size: samples of a pack.
    """

    def __init__(self, order: SampleOrder, corpus: Corpus, longest: int, window: int, batch_size: int) -> None:
        if window % batch_size:
            raise ValueError(f"a window of {window} samples cannot be cut into packs of {batch_size}")
        self.order = order
        self.window = window
        self._corpus = corpus
        self._longest = longest
        self._batch_size = batch_size
        # The packs of a window are asked for one after another.
        self._recent: tuple[int, Int64] | None = None

    def __call__(self, consumed: int) -> Int64:
        """Samples of the pack that comes after ``consumed`` others: [batch_size], the shortest first."""
        number, within = divmod(consumed, self.window)
        packs = self.window // self._batch_size
        place = within // self._batch_size
        if self.order.shuffle:
            order = Permutation(packs, f"seed {self.order.seed} packs of window {number}")
            place = int(order(np.asarray([place]))[0])
        return self._sorted(number)[place * self._batch_size : (place + 1) * self._batch_size]

    def _sorted(self, number: int) -> Int64:
        if self._recent is None or self._recent[0] != number:
            samples = self.order.take(number * self.window, self.window)
            starts = self._corpus.starts
            lengths = np.minimum(starts[samples + 1] - starts[samples], self._longest)
            # Stable: samples of one length stay in the order that the seed gave them.
            self._recent = (number, samples[np.argsort(lengths, kind="stable")])
        return self._recent[1]
