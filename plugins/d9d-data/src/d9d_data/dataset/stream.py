"""Stream of the dataset ``dataset``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from d9d_core.data import DataContext
from d9d_core.errors import DataError
from d9d_core.types import State

from d9d_data.dataset.config import DatasetConfig
from d9d_data.dataset.items import Items
from d9d_data.dataset.iterable import IterableStream
from d9d_data.library.bucketing import sorted_packs
from d9d_data.order.layout import Layout
from d9d_data.order.samples import SampleOrder
from d9d_data.stream.base import PackStream
from d9d_data.stream.one_pass import ROWS, OnePassStream
from d9d_data.stream.reader import Arrays

Int64 = npt.NDArray[np.int64]


def build_dataset(config: DatasetConfig, context: DataContext) -> DatasetStream | IterableStream | OnePassStream:
    """Make a map-style or iterable dataset with the user's function, and open its stream.

    Raises:
        DataError: the function fails, or the dataset or the sizes of its items are invalid.
    """
    items = Items(config)
    if items.iterable:
        facts = {name: value for name, value in _facts_of(items).items() if name != "samples"}
        return IterableStream(config, context, items, _described(items), facts)
    if not context.one_pass:
        return DatasetStream(config, context, items)
    items.check_padding()
    _check_sizes(config, items)
    window = config.bucket_window or context.microbatch_size  # without buckets nothing is sorted
    count = len(items)
    identity = f"dataset {_described(items)} {count}"
    needs = "build, arguments, the number of items and the 'fingerprint' of the dataset if it has one"
    source, facts = ItemSamples(items), _facts_of(items)
    return OnePassStream(
        source, count, count, context, config.workers, identity, needs, facts, items.save_assets, window
    )


@dataclass(frozen=True, slots=True)
class ItemSamples:
    """Source of microbatches from arbitrary items of a map-style dataset."""

    items: Items

    def sizes(self, samples: Int64) -> npt.NDArray[np.float64]:
        """Sizes [B] of items, for sorting."""
        return self.items.sizes(samples.tolist())

    def microbatch(self, samples: Int64) -> Mapping[str, npt.NDArray[Any]]:
        """Microbatch of items: arrays [B, ...] and ``rows``, the indices [B] of the items.

        Raises:
            DataError: the items have a field ``rows``.
        """
        collated = self.items.collate(samples.tolist())
        if ROWS in collated:
            raise DataError(
                f"data.build: items of {self.items.config.build} have a field '{ROWS}', which one pass uses for item "
                "indices; rename the field"
            )
        return {**collated, ROWS: samples}


def _described(items: Items) -> str:
    """Identity of a dataset: functions, arguments and, if it has one, its fingerprint. The items are not part of it."""
    own = getattr(items.dataset, "fingerprint", None)
    config = items.config
    collate = [] if config.collate is None else [config.collate]
    return json.dumps([config.build, config.arguments, own if isinstance(own, str) else None, *collate], default=str)


def _facts_of(items: Items) -> dict[str, Any]:
    """Facts of a dataset: number of samples of an epoch, name of its function, and its own ``facts`` if any."""
    own = getattr(items.dataset, "facts", {})
    return {"samples": len(items), "dataset": items.config.build, **(own if isinstance(own, Mapping) else {})}


class DatasetStream(PackStream):
    """Stream of a map-style dataset, each item of which is a sample.

    A pack, the samples of one step, has the next ``batch_size`` samples of a global order. Without buckets, rank r of R
    takes the r-th of R equal contiguous parts of the pack. With buckets, the samples of a pack are dealt to the
    ranks in order of size, so that the n-th microbatches of all ranks have similar sizes.

    Args:
        config: config of the dataset.
        context: context of the job.
        items: items of the dataset.

    Raises:
        DataError: an item cannot be used, or the sizes of the items are unknown.
    """

    tokenisation = None

    def __init__(self, config: DatasetConfig, context: DataContext, items: Items) -> None:
        layout = Layout.of(context)
        items.check_padding()
        window = config.bucket_window
        _check_window(config, items, layout.batch_size)
        order = SampleOrder(len(items), context.seed, config.shuffle)
        source = DatasetPacks(items, order, layout, window)
        self._items = items
        sizes = f"{window} {layout.batch_size}" if window else ""
        needs = "build, arguments, the number of items, the 'fingerprint' of the dataset if it has one, shuffle and "
        needs += "bucket_window, and with that batch.size,"
        identity = f"dataset {_described(items)} {len(items)} {config.shuffle} {sizes}"
        super().__init__(source, layout.batch_size, config.workers, identity, needs)

    @property
    def facts(self) -> State:
        """Facts of the dataset: number of samples of an epoch, name of its function, and its own ``facts`` if any."""
        return _facts_of(self._items)

    def save_assets(self, directory: Path) -> None:
        """Call the dataset's ``save_assets``, if it has one, to write files for an exported model."""
        self._items.save_assets(directory)


@dataclass(frozen=True, slots=True)
class DatasetPacks:
    """Source of one rank's share of any pack (samples of a step) of a map-style dataset; see :class:`DatasetStream`.

    Attributes:
        items: items of the dataset.
        order: order of the samples before sorting.
        layout: layout of the packs.
        window: number of samples sorted together; ``None`` for no sorting.
        sorted: samples of the last sorted window, in the order of its packs, by epoch and number of the window.
    """

    items: Items
    order: SampleOrder
    layout: Layout
    window: int | None
    sorted: dict[tuple[int, int], Int64] = field(default_factory=dict, compare=False)

    def pack_at(self, consumed: int) -> Arrays:
        """Microbatches of a pack (the samples of a step): mappings of field names to arrays [B, ...]."""
        layout = self.layout
        if self.window is None:
            mine = self.order.take(consumed + layout.rank * layout.share, layout.share)
        else:
            mine = self._sorted_pack(consumed, self.window)[layout.rank :: layout.ranks]
        return [
            self.items.collate(mine[begin : begin + layout.microbatch_size].tolist())
            for begin in range(0, layout.share, layout.microbatch_size)
        ]

    def _sorted_pack(self, consumed: int, window: int) -> Int64:
        """Samples of a pack, of similar size, from the sorted window of samples to which the pack belongs.

        Windows begin with the first pack that begins in an epoch, and the last window of an epoch may have fewer packs.
        The samples of a pack across the end of an epoch are only sorted by size.
        """
        size, samples = self.layout.batch_size, self.order.samples
        epoch, place = divmod(consumed, samples)
        if place + size > samples:
            taken = self.order.take(consumed, size)
            return taken[np.argsort(self.items.sizes(taken.tolist()), kind="stable")]
        begun = -epoch * samples % size  # samples of this epoch in the pack that spans its beginning
        number, within = divmod(place - begun, window)
        if (epoch, number) not in self.sorted:  # sizes may cost reading all items of the window
            first = begun + number * window
            count = min(window, (samples - first) // size * size)
            taken = self.order.take(epoch * samples + first, count)
            key = f"seed {self.order.seed} packs of window {number} of epoch {epoch}" if self.order.shuffle else None
            packs = sorted_packs(self.items.sizes(taken.tolist()), size, key)
            self.sorted.clear()
            self.sorted[epoch, number] = taken[packs]
        return self.sorted[epoch, number][within : within + size]


def _check_window(config: DatasetConfig, items: Items, batch_size: int) -> None:
    window = config.bucket_window
    if window is None:
        return
    if window % batch_size:
        below = window // batch_size * batch_size
        options = " or ".join(str(size) for size in (below, below + batch_size) if size)
        raise DataError(
            f"data.bucket_window: {window} samples cannot be cut into batches of {batch_size}; use {options}"
        )
    if batch_size > len(items):
        raise DataError(
            f"batch.size: a batch of {batch_size} samples is larger than the {len(items)} items; lower batch.size"
        )
    _check_sizes(config, items)


def _check_sizes(config: DatasetConfig, items: Items) -> None:
    """Raise if buckets are requested but items have no size."""
    if config.bucket_window is None:
        return
    if not config.padding and getattr(items.dataset, "sort_key", None) is None:
        raise DataError(
            "data.bucket_window: the size of items is unknown; give the dataset a method sort_key(index), or name "
            "the field whose length varies in data.padding"
        )
