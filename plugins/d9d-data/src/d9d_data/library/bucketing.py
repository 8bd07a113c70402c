"""Bucketing: items of similar size next to each other, in an otherwise random order.

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
    """Map-style dataset that gives the size of an item without reading the item."""

    def sort_key(self, index: int) -> float:
        """Size of an item, such as its number of tokens."""
        ...


class BufferSortedDataset(Dataset[Any]):
    """Bucketing for a PyTorch dataset: reorders the items so that each pack has items of similar size.

    Each ``buffer_size`` consecutive items are sorted by size and cut into packs, and the packs are shuffled; an
    incomplete pack stays last. Shuffle the items first if their own order is not random.

    Args:
        dataset: dataset with a ``sort_key``.
        buffer_size: W, number of items sorted together; a multiple of ``pack_size``.
        pack_size: number of items in a pack: a batch, or the items that several ranks read together.
        seed: seed for the order of the packs; ``None`` keeps them sorted.

    Raises:
        ValueError: ``buffer_size`` is not a multiple of ``pack_size``, or a size is below 1.
    """

    def __init__(self, dataset: HasSortKey, buffer_size: int, pack_size: int, seed: int | None = 0) -> None:
        if pack_size < 1 or buffer_size < 1 or buffer_size % pack_size:
            raise ValueError(f"buffer_size {buffer_size} is not a positive multiple of pack_size {pack_size}; use one")
        self._dataset = dataset
        self._buffer_size = buffer_size
        self._pack_size = pack_size
        self._seed = seed
        self._recent: tuple[int, Int64] = (-1, np.zeros(0, dtype=np.int64))

    def __len__(self) -> int:
        return len(self._dataset)

    def sort_key(self, index: int) -> float:
        """Size of the item at an index of the new order."""
        return self._dataset.sort_key(self.place_of(index))

    def place_of(self, index: int) -> int:
        """Index in the original dataset of the item at a new index.

        Raises:
            IndexError: the index is negative, or not below the number of items.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"there is no item {index} in a dataset of {len(self)} items")
        buffer, place = divmod(index, self._buffer_size)
        first = buffer * self._buffer_size
        if self._recent[0] != buffer:
            count = min(self._buffer_size, len(self) - first)
            keys = np.asarray([self._dataset.sort_key(item) for item in range(first, first + count)])
            key = None if self._seed is None else f"seed {self._seed} packs of buffer {buffer}"
            self._recent = (buffer, sorted_packs(keys, self._pack_size, key))
        return first + int(self._recent[1][place])

    def __getitem__(self, index: int) -> Any:
        """Item at a new index.

        Raises:
            IndexError: the index is negative, or not below the number of items.
        """
        return self._dataset[self.place_of(index)]


def sorted_packs(keys: npt.NDArray[Any], pack_size: int, key: str | None) -> Int64:
    """Permutation of items in which each pack has items of similar size.

    Args:
        keys: sizes [W]. Items of equal size keep their order.
        pack_size: number of items in a pack.
        key: seed for the order of the full packs; ``None`` keeps them sorted.

    Returns:
        Permutation: the index of the item at each new position, [W].
    """
    order = np.argsort(keys, kind="stable").astype(np.int64)
    packs = len(order) // pack_size
    if key is None or not packs:
        return order
    full = order[: packs * pack_size].reshape(packs, pack_size)
    shuffled = full[Permutation(packs, key)(np.arange(packs))].reshape(-1)
    return np.concatenate([shuffled, order[packs * pack_size :]])
