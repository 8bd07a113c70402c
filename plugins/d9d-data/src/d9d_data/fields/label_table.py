"""Labels of a corpus: their ids, and the check of labels in records."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from d9d_core.config import closest
from d9d_core.errors import DataError

from d9d_data.sources.kinds import kind_of

#: Id for "no label"; the loss ignores it.
NO_LABEL = -100
#: Largest number of classes: a head has a row for each.
MAX_CLASSES = 1 << 20
_NUMBER = re.compile(r"0|[1-9][0-9]{0,6}")
Label = str | int


class LabelTable:
    """Table of labels: the names listed in a config, or else names and numbers in order of their first use.

    Args:
        names: names of the classes; ``None`` to collect them from the data.
    """

    def __init__(self, names: Sequence[str] | None) -> None:
        self._listed = None if names is None else list(names)
        self._ids: dict[Label, int] = {name: number for number, name in enumerate(names or ())}

    @property
    def labels(self) -> tuple[Label, ...]:
        """Labels by their ids in this table."""
        return tuple(self._ids)

    def check(self, value: Any, where: str) -> Label:
        """Check a record's value, and return it as a label.

        Args:
            value: a name, a number, or -100 for no label.
            where: name of the value in error messages.

        Raises:
            DataError: the value is not a label, or not one of the listed classes.
        """
        if isinstance(value, float) and value.is_integer():  # columns of numbers with missing values are read as floats
            value = int(value)
        numeric = isinstance(value, str) and value not in self._ids and _NUMBER.fullmatch(value)
        if isinstance(value, bool) or (numeric and self._listed is not None):  # CSV files have numbers as strings
            value = int(value)
        if not isinstance(value, str | int) or value == "":
            shown = "empty" if value is None or value == "" else kind_of(value)
            raise DataError(f"{where} is {shown}; give the name or the number of a class, or -100 for none")
        if value == NO_LABEL:
            return NO_LABEL
        if isinstance(value, int):
            most = MAX_CLASSES if self._listed is None else len(self._listed)
            if not 0 <= value < most:
                raise DataError(f"{where} is {value}; class numbers are 0 to {most - 1:,}, or -100 for no label")
        elif self._listed is not None and value not in self._ids:
            near = closest(value, self._listed)
            known = f"did you mean '{near}'?" if near else f"data.labels has {', '.join(self._listed[:20])}"
            raise DataError(f"{where} is the unknown name {value[:80]!r}; {known}")
        return value

    def id_of(self, label: Label) -> int:
        """Id of a checked label in this table; a new label is added."""
        if label == NO_LABEL:
            return NO_LABEL
        if self._listed is not None and isinstance(label, int):
            return label
        return self._ids.setdefault(label, len(self._ids))


class Classes:
    """Classes of a whole corpus, from the label tables of its shards.

    Names get ids in the order of ``listed``, or else in sorted order. If no names are listed and all labels are
    numbers, also as strings of CSV files, the numbers are the ids.

    Args:
        tables: labels of each shard, in the order of their ids in the shard.
        listed: names of the classes, if a config lists them; then all tables use the ids of this list.

    Raises:
        DataError: no names are listed, some labels are names, and other labels are numbers.
    """

    def __init__(self, tables: Sequence[Sequence[Label]], listed: Sequence[str] | None) -> None:
        labels = {label for table in tables for label in table}
        numeric = all(isinstance(label, int) or _NUMBER.fullmatch(label) for label in labels)
        #: Names by id; ``None`` if the labels are numbers.
        self.names: tuple[str, ...] | None = None
        self._ids: dict[Label, int]
        if listed is not None:
            self.names, self._ids = tuple(listed), {name: number for number, name in enumerate(listed)}
        elif numeric:
            self._ids = {label: int(label) for label in labels}
        else:
            numbers = [label for label in labels if isinstance(label, int)]
            names = sorted(label for label in labels if isinstance(label, str))
            if numbers:
                raise DataError(
                    f"data.label: some labels are names ({names[0]!r}) and others numbers ({min(numbers)}); use one "
                    "kind, or list the names in data.labels"
                )
            self.names, self._ids = tuple(names), {name: number for number, name in enumerate(names)}
        #: Number of classes: the largest id plus 1.
        self.count = len(self.names) if self.names is not None else max(self._ids.values(), default=-1) + 1

    def mapped(self, values: npt.NDArray[np.int32], table: Sequence[Label]) -> npt.NDArray[np.int32]:
        """Map the ids of a shard's table to the ids of the corpus."""
        # "No label" maps to itself: it reads the last entry, at index -1.
        ids = np.asarray([*(self._ids[label] for label in table), NO_LABEL], dtype=np.int32)
        mapped: npt.NDArray[np.int32] = ids[np.where(values == NO_LABEL, -1, values)]
        return mapped
