"""Records, their locations (file and line) for error messages, and the handling of malformed records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from d9d_core.errors import DataError

from d9d_data.sources.opening import SourceFile, open_content

T = TypeVar("T")

_BLOCK = 1 << 20  # bytes


@dataclass(frozen=True, slots=True)
class Place:
    """Location in a source file, for error messages, such as ``a.jsonl:7`` or ``a.parquet row 7``.

    Attributes:
        file: the file.
        number: number of the line or row, from 1; 0 for the whole file.
        unit: text between the file's name and the number.
        begin: byte from which lines are counted, if not from the start of the file.
    """

    file: SourceFile
    number: int = 0
    unit: str = ":"
    begin: int = 0

    def __str__(self) -> str:
        if not self.number:
            return self.file.name
        if self.begin:
            return f"{self.file.name}, line {self.number} after byte {self.begin:,},"
        return f"{self.file.name}{self.unit}{self.number}"

    def exact(self) -> str:
        """Location with the line number in the whole file; counts the lines of the file before ``begin``."""
        if not self.begin:
            return str(self)
        # Counting starts at the first line that begins at or after ``begin``; each line end before it adds one.
        before, left = 1, self.begin - 1
        with open_content(self.file) as content:
            while left and (block := content.read(min(_BLOCK, left))):
                before += block.count(b"\n")
                left -= len(block)
        return str(Place(self.file, before + self.number, self.unit))


@dataclass(frozen=True, slots=True)
class Record:
    """Record of a structured file: values by field name, and the record's location for error messages."""

    values: Mapping[str, Any]
    place: Place


#: Called with the place of a malformed record and its problem; raises, or returns to leave the record out.
Reject = Callable[[Place, str], None]


def refuse(place: Place, problem: str) -> None:
    """Raise an error about a malformed record.

    Raises:
        DataError: always.
    """
    raise DataError(f"data.sources: {place.exact()} {problem}")


class Numbering:
    """Numbers of consecutive records, from 0: malformed records that are left out count too.

    So a record has the same number for every reader of its corpus, whatever the reader leaves out afterwards.

    Args:
        reject: called for each malformed record.
    """

    def __init__(self, reject: Reject) -> None:
        self._reject = reject
        self._count = 0

    def reject(self, place: Place, problem: str) -> None:
        """Count a malformed record, and treat it as ``reject`` does."""
        self._reject(place, problem)
        self._count += 1

    def of(self, records: Iterable[T]) -> Iterator[tuple[int, T]]:
        """Yield records with their numbers.

        Args:
            records: well-formed records, or their texts; their reader calls :meth:`reject` for each malformed record.
        """
        for record in records:
            self._count += 1
            yield self._count - 1, record
