"""Items of a user's dataset: read, checked and collated to microbatches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from d9d_core.config import closest
from d9d_core.containment import FOREIGN_FAILURES
from d9d_core.errors import DataError
from d9d_core.plugin import Ref

from d9d_data.dataset.config import DatasetConfig
from d9d_data.library.padding import pad_stack
from d9d_data.sources.kinds import type_of

Item = Mapping[str, npt.NDArray[Any]]
LENGTHS = "lengths"


class Items:
    """Items of the dataset that a config's function makes. A worker process calls the function again.

    Args:
        config: config that names the function.

    Raises:
        DataError: a function cannot be found, fails, or returns no dataset with items.

    Attributes:
        config: the config.
        dataset: the dataset.
        iterable: whether the dataset has no items by index, and is read in its own order.
    """

    def __init__(self, config: DatasetConfig) -> None:
        self.config = config
        self.dataset = _made(config)
        self.iterable = _is_iterable(self.dataset)
        self._count = 0 if self.iterable else _length(config, self.dataset)
        self._own_collate = None if config.collate is None else _function(config.collate, "collate")

    def __reduce__(self) -> tuple[Callable[..., Items], tuple[DatasetConfig]]:
        return Items, (self.config,)

    def __len__(self) -> int:
        return self._count

    @cached_property
    def _first(self) -> Item:
        return self._read(0)

    def read(self, index: int) -> Item:
        """Read an item as arrays.

        Raises:
            DataError: the item cannot be read, is not a mapping of numbers, or has other fields than item 0.
        """
        item = self._read(index)
        self._compare(item, index, self._first, 0)
        return item

    def _compare(self, item: Item, index: int, first: Item, of: int) -> None:
        """Raise unless two items have the same fields."""
        if item.keys() != first.keys():
            raise DataError(
                f"data.build: item {index} of {self.config.build} has the fields {_names(item)}, item {of} has "
                f"{_names(first)}; give all items the same fields"
            )

    def check_padding(self) -> None:
        """Check that the first item has the fields to pad, with one dimension.

        Raises:
            DataError: a field is missing, or has another number of dimensions.
        """
        for name in self.config.padding:
            if name not in self._first:
                near = closest(name, self._first)
                hint = f"did you mean '{near}'?" if near else f"they have {_names(self._first)}"
                raise DataError(f"data.padding: items of {self.config.build} have no field '{name}'; {hint}")
            if self._first[name].ndim != 1:
                raise DataError(
                    f"data.padding: field '{name}' of {self.config.build} has shape {list(self._first[name].shape)}, "
                    "but only one-dimensional fields can be padded; remove it from padding"
                )

    def sizes(self, indices: Sequence[int]) -> npt.NDArray[np.float64]:
        """Sizes of the items at ``indices``, by which they are sorted; float64 [len(indices)].

        Raises:
            DataError: an item cannot be read, or ``sort_key`` fails or does not return numbers.
        """
        own = getattr(self.dataset, "sort_key", None)
        if own is None:
            name = next(iter(self.config.padding))
            return np.asarray([len(self.read(index)[name]) for index in indices], dtype=np.float64)
        where = f"of {self.config.build}"
        keys = [self.asked(partial(own, index), f"sort_key({index}) {where}") for index in indices]
        try:
            return np.asarray(keys, dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise DataError(
                f"data.build: sort_key of the dataset of {self.config.build} does not return numbers: {error}"
            ) from error

    def collate(self, indices: Sequence[int]) -> Item:
        """Collate items into a microbatch of arrays [B, ...]; right padding adds ``lengths`` [B], the unpadded lengths.

        Raises:
            DataError: an item cannot be read, the arrays of a field have different dtypes or have different shapes and
                no padding, or the user's function fails.
        """
        if self._own_collate is not None:
            return self.collate_raw([self._raw(index) for index in indices], indices)
        return self._padded([self.read(index) for index in indices], indices)

    def collate_raw(self, items: Sequence[Any], indices: Sequence[int]) -> Item:
        """Collate items as the dataset returned them; see :meth:`collate`.

        Args:
            items: items.
            indices: their indices, or their places in an iterable dataset, for error messages.

        Raises:
            DataError: an item is unusable, or the user's function fails.
        """
        if self._own_collate is None:
            rows = [self._checked(item, index) for item, index in zip(items, indices, strict=True)]
            for row, index in zip(rows, indices, strict=True):
                self._compare(row, index, rows[0], indices[0])
            return self._padded(rows, indices)
        collate, name = self._own_collate, self.config.collate
        batch = self.asked(lambda: collate(list(items)), f"items {indices[0]} to {indices[-1]}", f"collate: {name}")
        where = f"data.collate: {name}"
        if not isinstance(batch, Mapping) or not batch:
            found = "an empty mapping" if isinstance(batch, Mapping) else type_of(batch)
            raise DataError(f"{where} returned {found}; return a mapping from names to arrays")
        arrays = {str(key): _array(value, f"{where}: field '{key}'") for key, value in batch.items()}
        for key, array in arrays.items():
            if not array.ndim or len(array) != len(items):
                raise DataError(
                    f"{where}: field '{key}' has shape {list(array.shape)} for {len(items)} items; the first dimension "
                    "is the number of items"
                )
        return arrays

    def _padded(self, rows: Sequence[Item], indices: Sequence[int]) -> Item:
        config = self.config
        batch = {name: self._stacked(name, [row[name] for row in rows], indices) for name in rows[0]}
        if config.padding and config.side == "right" and LENGTHS not in batch:
            name = next(iter(config.padding))
            batch[LENGTHS] = np.asarray([len(row[name]) for row in rows], dtype=np.int64)
        return batch

    def save_assets(self, directory: Path) -> None:
        """Call the dataset's ``save_assets``, if it has one, to write files for an exported model."""
        save = getattr(self.dataset, "save_assets", None)
        if callable(save):
            save(directory)

    def _stacked(self, name: str, arrays: Sequence[npt.NDArray[Any]], indices: Sequence[int]) -> npt.NDArray[Any]:
        config = self.config
        if kinds := {array.dtype for array in arrays} - {arrays[0].dtype}:
            found = ", ".join(sorted(str(kind) for kind in {*kinds, arrays[0].dtype}))
            raise DataError(f"data.build: field '{name}' of {config.build} has several dtypes: {found}; use one")
        if name in config.padding and arrays[0].ndim == 1:
            tensors = [torch.from_numpy(array) for array in arrays]
            padded = pad_stack(tensors, config.padding[name], config.side, config.pad_multiple).numpy()
            assert isinstance(padded, np.ndarray)
            return padded
        for index, array in zip(indices, arrays, strict=True):
            if array.shape != arrays[0].shape:
                raise DataError(
                    f"data.padding: field '{name}' has shape {list(arrays[0].shape)} in item {indices[0]} of "
                    f"{config.build} and {list(array.shape)} in item {index}; "
                    + (
                        f"set its padding value, such as 'padding: {{{name}: 0}}'"
                        if array.ndim == arrays[0].ndim == 1
                        else "return equal shapes, since only one-dimensional fields can be padded"
                    )
                )
        return np.stack(arrays)

    def _read(self, index: int) -> Item:
        return self._checked(self._raw(index), index)

    def _raw(self, index: int) -> Any:
        return self.asked(lambda: self.dataset[index], f"item {index} of {self.config.build}")

    def _checked(self, item: Any, index: int) -> Item:
        """Convert the fields of an item to arrays; raise ``DataError`` if the item is no mapping or has no fields."""
        where = f"data.build: item {index} of {self.config.build}"
        if not isinstance(item, Mapping):
            raise DataError(
                f"{where} is {type_of(item)}; return a mapping from names to numbers, such as "
                '{"tokens": [1, 2], "targets": [2, 3]}'
            )
        if not item:
            raise DataError(f"{where} is an empty mapping; return one with at least one field")
        return {str(name): _array(value, f"{where}: field '{name}'") for name, value in item.items()}

    def asked(self, read: Callable[[], Any], what: str, field: str = "build") -> Any:
        """Call code of the user; a failure becomes an error that names the function.

        Args:
            read: the call.
            what: description of the call.
            field: field of the config that names the code; may end with text that comes before the description.

        Raises:
            DataError: the call failed.
        """
        try:
            return read()
        except FOREIGN_FAILURES as failure:
            error = DataError(f"data.{field}: {what} raised {type(failure).__name__}: {failure}")
            error.origin = failure
            raise error from failure


def _function(name: str, field: str) -> Callable[..., Any]:
    """Function that a field of the config names."""
    try:
        function = Ref(name).load()
    except FOREIGN_FAILURES as failure:
        error = DataError(
            f"data.{field}: {name} cannot be imported: {type(failure).__name__}: {failure}; write "
            "'package.module:function', installed or in a directory of PYTHONPATH"
        )
        error.origin = failure
        raise error from failure
    if not callable(function):
        raise DataError(f"data.{field}: {name} is {type_of(function)}, not a function")
    found: Callable[..., Any] = function
    return found


def _is_iterable(dataset: Any) -> bool:
    """Whether a dataset has an iterator, but no items by index."""
    indexed = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    return isinstance(dataset, torch.utils.data.IterableDataset) or (hasattr(dataset, "__iter__") and not indexed)


def _made(config: DatasetConfig) -> Any:
    function = _function(config.build, "build")
    try:
        return function(**config.arguments)
    except FOREIGN_FAILURES as failure:
        given = ", ".join(config.arguments) or "no arguments"
        error = DataError(
            f"data.build: {config.build} raised {type(failure).__name__} with {given}: {failure}; "
            "correct it, or data.arguments"
        )
        error.origin = failure
        raise error from failure


def _length(config: DatasetConfig, dataset: Any) -> int:
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")) or isinstance(dataset, Mapping):
        raise DataError(
            f"data.build: {config.build} returned {type_of(dataset)}, not a dataset; return an "
            "object with __len__() and __getitem__(index), or with __iter__(), such as a torch.utils.data.Dataset or "
            "one split of a Hugging Face dataset"
        )
    try:
        count = len(dataset)
    except FOREIGN_FAILURES as failure:
        raise DataError(
            f"data.build: len() of the dataset of {config.build} fails: {failure}; correct its __len__()"
        ) from failure
    if not count:
        raise DataError(f"data.build: the dataset of {config.build} has no items; correct it, or data.arguments")
    return count


def _array(value: Any, where: str) -> npt.NDArray[Any]:
    """Array of a value: numbers and lists become int64, bool or float32; arrays and tensors keep their dtypes.

    bfloat16 tensors become float32, because numpy has no bfloat16.
    """
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise DataError(f"{where} is not an array: {error}; give nested lists of equal lengths") from error
    if array.dtype.kind not in "biuf":
        kind = type(value).__name__
        raise DataError(f"{where} is a {kind} of {array.dtype}, not of numbers; omit the field, or give numbers")
    if not isinstance(value, np.ndarray | np.generic):
        narrow = {"i": np.int64, "u": np.int64, "f": np.float32, "b": np.bool_}
        # An empty list has no dtype; most lists hold token ids.
        array = array.astype(np.int64 if not array.size else narrow[array.dtype.kind])
    return array


def _names(item: Item) -> str:
    return ", ".join(sorted(item))
