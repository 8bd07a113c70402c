"""Shards of a dataset for ranks that read different samples."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any, Literal, Protocol, Self, TypeVar

from d9d_core.data import DataContext
from torch.utils.data import Dataset

T_co = TypeVar("T_co", covariant=True)


class MapDataset(Sized, Protocol[T_co]):
    """Dataset of known length, read by index."""

    def __getitem__(self, index: int, /) -> T_co:
        """Item at an index from 0."""
        ...


class ShardedDataset(Dataset[Any]):
    """One shard of a map-style dataset. Shards share no item, unless ``pad_to_equal_size`` repeats the last item.

    Args:
        dataset: dataset to divide.
        total: number of shards.
        current: index of this shard, from 0.
        mode: ``sequential`` deals the items in turn (with four shards, shard 0 has items 0, 4, 8, ...); ``chunked``
            cuts the dataset into consecutive runs, of which the first are longer by one if the division has a
            remainder.
        pad_to_equal_size: give all shards the same number of items by repeating the last item, so that all ranks take
            the same number of steps.

    Raises:
        ValueError: the shard does not exist, or ``mode`` is unknown.
    """

    def __init__(
        self,
        dataset: MapDataset[Any],
        total: int,
        current: int,
        mode: Literal["sequential", "chunked"] = "sequential",
        pad_to_equal_size: bool = False,
    ) -> None:
        if not 0 <= current < total:
            raise ValueError(f"shard {current} of {total}: shards are numbered from 0 to {total - 1}")
        if mode not in ("sequential", "chunked"):
            raise ValueError(f"mode is {mode!r}; use 'sequential' or 'chunked'")
        self._dataset = dataset
        self._total = total
        self._current = current
        self._mode = mode
        self._pad = pad_to_equal_size

    @classmethod
    def of(
        cls,
        dataset: MapDataset[Any],
        context: DataContext,
        mode: Literal["sequential", "chunked"] = "sequential",
        pad_to_equal_size: bool = False,
    ) -> Self:
        """Make the shard for this data-parallel rank of a job."""
        return cls(dataset, context.ranks, context.rank, mode, pad_to_equal_size)

    def __len__(self) -> int:
        share, longer = divmod(len(self._dataset), self._total)
        return share + (longer > 0 if self._pad else self._current < longer)

    def __getitem__(self, index: int) -> Any:
        """Item of the shard.

        Raises:
            IndexError: the shard has fewer items.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"there is no item {index} in a shard of {len(self)} items")
        size = len(self._dataset)
        share, longer = divmod(size, self._total)
        if self._mode == "sequential":
            place = index * self._total + self._current
        elif index < share + (self._current < longer):
            place = self._current * share + min(self._current, longer) + index
        else:
            place = size  # this shard has one item less
        return self._dataset[min(place, size - 1)]
