"""Order of samples: a function of the seed and of the number of consumed samples only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from d9d_data.order.permutation import Permutation


@dataclass(frozen=True, slots=True)
class SampleOrder:
    """Order of samples: an endless sequence; each epoch visits every sample once.

    Attributes:
        samples: number of samples.
        seed: seed of the orders of all epochs.
        shuffle: draw a random order for each epoch; false keeps the order of the samples.
    """

    samples: int
    seed: int
    shuffle: bool

    def take(self, first: int, count: int) -> npt.NDArray[np.int64]:
        """Samples at positions ``first`` to ``first + count`` (exclusive) of the sequence: [count]."""
        places = np.arange(first, first + count, dtype=np.int64)
        epochs, within = np.divmod(places, self.samples)
        if not self.shuffle:
            return within
        chosen = np.empty_like(within)
        for epoch in sorted(set(epochs.tolist())):
            here = epochs == epoch
            # The key has both numbers, so that epoch 1 of seed 0 is unrelated to epoch 0 of seed 1.
            chosen[here] = Permutation(self.samples, f"seed {self.seed} epoch {epoch}")(within[here])
        return chosen
