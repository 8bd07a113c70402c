"""Stream of an iterable dataset, in its own order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from d9d_core.data import DataContext
from d9d_core.errors import DataError
from d9d_core.types import State

from d9d_data.dataset.config import DatasetConfig
from d9d_data.dataset.items import Items
from d9d_data.order.layout import Layout
from d9d_data.stream.base import PackStream
from d9d_data.stream.reader import Arrays


class IterablePacks:
    """Source of one rank's share of the packs of an iterable dataset.

    To continue at an item, the dataset is read from its beginning, or skips if it has a method ``skip(count)``. At its
    end it is read again; its method ``set_epoch(epoch)``, if any, is called before each epoch. All ranks read all
    items, and each rank keeps its own.

    Args:
        items: items of the dataset.
        layout: layout of the packs.

    Attributes:
        length: number of items of an epoch; ``None`` before the end of the first epoch.
        may_skip: whether the state of an earlier run was loaded; its place lies within an epoch, so the dataset may
            skip to it without counting its items.
    """

    def __init__(self, items: Items, layout: Layout) -> None:
        self.length: int | None = None
        self.may_skip = False
        self._items = items
        self._layout = layout
        self._epoch = self._place = 0
        self._iterator: Iterator[Any] | None = None

    def pack_at(self, consumed: int) -> Arrays:
        """Microbatches of items, arrays [B, ...]."""
        layout = self._layout
        self._go_to(consumed)
        taken = [self._next() for _ in range(layout.batch_size)]
        mine = range(layout.rank * layout.share, (layout.rank + 1) * layout.share, layout.microbatch_size)
        return [
            self._items.collate_raw(
                taken[begin : begin + layout.microbatch_size],
                range(consumed + begin, consumed + begin + layout.microbatch_size),
            )
            for begin in mine
        ]

    def _go_to(self, consumed: int) -> None:
        """Continue at an item, counted over all epochs."""
        known = self.length
        epoch, place = (0, consumed) if known is None else divmod(consumed, known)
        if self._iterator is None or epoch != self._epoch or place < self._place:
            self._open(epoch, place)
        while (self._epoch, self._place) < (epoch, place):
            self._next()
            if self.length != known:  # the first epoch ended, so the item is in a later epoch
                self._go_to(consumed)
                return

    def _open(self, epoch: int, place: int = 0) -> None:
        items, dataset = self._items, self._items.dataset
        where = f"of {items.config.build}"
        set_epoch, skip = getattr(dataset, "set_epoch", None), getattr(dataset, "skip", None)
        if callable(set_epoch):
            items.asked(lambda: set_epoch(epoch), f"set_epoch({epoch}) {where}")
        self._epoch, self._place = epoch, 0
        if place and self.may_skip and callable(skip):
            dataset, self._place = items.asked(lambda: skip(place), f"skip({place}) {where}"), place
        self._iterator = items.asked(lambda: iter(dataset), f"the iterator {where}")
        if self._iterator is dataset:
            raise DataError(
                f"data.build: {items.config.build} returned an iterator, which can be read only once; return an object "
                "whose __iter__() begins again"
            )

    def _next(self) -> Any:
        config = self._items.config
        end = object()
        assert self._iterator is not None
        iterator = self._iterator
        item = self._items.asked(lambda: next(iterator, end), f"item {self._place} of {config.build}")
        if item is not end:
            self._place += 1
            return item
        if not self._place:
            raise DataError(f"data.build: the dataset of {config.build} is empty")
        if self.length not in (None, self._place):
            raise DataError(
                f"data.build: epoch {self._epoch} of {config.build} has {self._place:,} items, but the first had "
                f"{self.length:,}; give all epochs the same number, so that a run can be resumed"
            )
        self.length = self._place
        self._open(self._epoch + 1)
        return self._next()


class IterableStream(PackStream):
    """Stream of an iterable dataset; each item is a sample. A pack is the next ``batch_size`` items.

    Rank r of R takes the r-th of R equal contiguous parts of the pack. The stream has no end, and cannot make one pass.

    Args:
        config: config of the dataset.
        context: context of the job.
        items: items of the dataset.
        identity: text that describes the dataset.
        facts: facts of the dataset.

    Raises:
        DataError: the config has a field that needs items by index.
    """

    tokenisation = None

    def __init__(self, config: DatasetConfig, context: DataContext, items: Items, identity: str, facts: State) -> None:
        needs = {
            "shuffle": (config.shuffle, "keeps its own order; write 'shuffle: false', and shuffle in the dataset"),
            "bucket_window": (config.bucket_window is not None, "has no sizes by index; remove it"),
            "workers": (config.workers, "is read by each process; use 0, and workers inside the dataset"),
        }
        for field, (given, reason) in needs.items():
            if given:
                raise DataError(f"data.{field}: the iterable dataset of {config.build} {reason}")
        layout = Layout.of(context)
        self._items, self._facts = items, facts
        self._packs = IterablePacks(items, layout)
        needed = "build, arguments, collate and the 'fingerprint' of the dataset if it has one"
        super().__init__(self._packs, layout.batch_size, 0, f"iterable {identity}", needed)

    @property
    def facts(self) -> State:
        """Name of the dataset's function, and the dataset's own ``facts`` if any."""
        return self._facts

    def state(self) -> State:
        """State of the base class, with the number of items of an epoch if it is known."""
        return {**super().state(), "epoch_items": self._packs.length}

    def load_state(self, state: State) -> None:
        """Continue at ``state``; ranks, batch size and microbatch size may differ from the saved run.

        Raises:
            DataError: the state belongs to other data, or is damaged.
        """
        length = state.get("epoch_items")
        if length is not None and (not isinstance(length, int) or length < 1):
            raise DataError(
                f"the checkpoint's data position is damaged: epoch_items is {length!r}; use another checkpoint"
            )
        super().load_state(state)
        self._packs.length, self._packs.may_skip = length, True

    def save_assets(self, directory: Path) -> None:
        """Call the dataset's ``save_assets``, if it has one, to write files for an exported model."""
        self._items.save_assets(directory)
