"""Bucketing: items of similar size next to each other, without giving up a random order.

Shapes: W items of a buffer.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from d9d_data.library.sharding import MapDataset
from d9d_data.order.permutation import Permutation

Int64 = npt.NDArray[np.int64]


class HasSortKey(MapDataset[Any], Protocol):
    """Map-style dataset that knows the size of an item without reading it."""

    def sort_key(self, index: int) -> float:
        """Size of an item, such as its number of tokens."""
        ...


class BufferSortedDataset(Dataset[Any]):
    """Bucketing for a PyTorch dataset: reorders it so that packs of consecutive items have about one size.

    Each ``buffer_size`` consecutive items are sorted by size and cut into packs, and the packs are shuffled; a pack
    that is not full stays last. Shuffle the items before, if they have an order of their own.

    Args:
        dataset: has a ``sort_key``.
        buffer_size: W, items that are sorted together; a multiple of ``pack_size``.
        pack_size: items of a pack: of a batch, or of those that several ranks read together.
        seed: chooses the order of the packs; ``None`` keeps them sorted.

    Raises:
        ValueError: the buffer is no multiple of the pack.
    """

    def __init__(self, dataset: HasSortKey, buffer_size: int, pack_size: int, seed: int | None = 0) -> None:
        if pack_size < 1 or buffer_size < 1 or buffer_size % pack_size:
            raise ValueError(f"a buffer of {buffer_size} items cannot be cut into packs of {pack_size}")
        self._dataset = dataset
        self._buffer_size = buffer_size
        self._pack_size = pack_size
        self._seed = seed
        self._recent: tuple[int, Int64] = (-1, np.zeros(0, dtype=np.int64))

    def __len__(self) -> int:
        return len(self._dataset)

    def sort_key(self, index: int) -> float:
        """Size of an item at its new place."""
        return self._dataset.sort_key(self.place_of(index))

    def place_of(self, index: int) -> int:
        """Index in the dataset of the item at ``index``.

        Raises:
            IndexError: there are fewer items.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"item {index} of a dataset of {len(self)}")
        buffer, place = divmod(index, self._buffer_size)
        first = buffer * self._buffer_size
        if self._recent[0] != buffer:
            count = min(self._buffer_size, len(self) - first)
            keys = np.asarray([self._dataset.sort_key(item) for item in range(first, first + count)])
            key = None if self._seed is None else f"seed {self._seed} packs of buffer {buffer}"
            self._recent = (buffer, sorted_packs(keys, self._pack_size, key))
        return first + int(self._recent[1][place])

    def __getitem__(self, index: int) -> Any:
        """Item at its new place.

        Raises:
            IndexError: there are fewer items.
        """
        return self._dataset[self.place_of(index)]


def sorted_packs(keys: npt.NDArray[Any], pack_size: int, key: str | None) -> Int64:
    """Order of items in which packs have items of similar size.

    Args:
        keys: [W] sizes. Items of one size stay in their order.
        pack_size: items of a pack.
        key: chooses the order of the full packs; ``None`` keeps them sorted.

    Returns:
        Which item stands at each place, [W].
    """
    order = np.argsort(keys, kind="stable").astype(np.int64)
    packs = len(order) // pack_size
    if key is None or not packs:
        return order
    full = order[: packs * pack_size].reshape(packs, pack_size)
    shuffled = full[Permutation(packs, key)(np.arange(packs))].reshape(-1)
    return np.concatenate([shuffled, order[packs * pack_size :]])
