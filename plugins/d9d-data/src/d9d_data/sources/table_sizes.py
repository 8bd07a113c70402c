"""Limits on the memory that a table file takes, checked from its headers before pyarrow allocates memory.

A kilobyte of Parquet or Arrow can expand to gigabytes: pages and buffers are compressed, and a dictionary can repeat
one long text in every row. A limit on rows would not prevent this, so all limits are in bytes.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from d9d_core.errors import DataError

from d9d_data.sources.opening import SourceFile, stat_file

#: Bytes of memory that any file may take at a time.
BUDGET = 1 << 28
#: Bytes of memory per stored byte up to which a file may exceed ``BUDGET``: texts compress to about a tenth.
RATIO = 20
#: Largest batch in rows and in bytes. Memory holds a batch three times: twice in pyarrow, once in Python.
_ROWS, _ROW_BYTES = 256, 1 << 26
#: Bytes of the largest page header (Parquet), and of the largest message metadata (Arrow).
_MAX_PAGE_HEADER, _MAX_MESSAGE = 1 << 20, 1 << 26
#: Bytes of a value other than a text, including Python's overhead.
_SCALAR = 16
_DICTIONARY_PAGE, _DATA_PAGES = 2, (0, 3)
_DICTIONARY_ENCODINGS, _DELTA_BYTE_ARRAY = (2, 8), 7
_RECORD_BATCH, _DICTIONARY_BATCH = 3, 2


def check_size(file: SourceFile, what: str, promised: int, stored: int) -> None:
    """Raise if a part of a file, such as a page, takes more memory than ``BUDGET`` and than ``RATIO`` times its size.

    Args:
        file: the file.
        what: name of the part, for the error message.
        promised: bytes of the part in memory, according to the file's headers.
        stored: bytes of the part in the file.

    Raises:
        DataError: the part is too large.
    """
    if promised > max(BUDGET, RATIO * stored):
        raise DataError(
            f"data.sources: {file.name}: {what} takes {promised:,} bytes in memory but has {stored:,} in the file; "
            "write the table again with smaller row groups or batches, or remove the file from the sources"
        )


@dataclass(frozen=True)
class ParquetSizes:
    """Plan for reading a Parquet file in bounded memory.

    Attributes:
        rows: number of rows of a batch.
        as_dictionary: columns to read as dictionaries, because expanding their repeated texts takes too much memory.
    """

    rows: int
    as_dictionary: Sequence[str]


def parquet_sizes(
    file: SourceFile, content: BinaryIO, metadata: Any, groups: Sequence[int], columns: Sequence[str] | None
) -> ParquetSizes:
    """Plan the reading of some row groups of a Parquet file, from the headers of their pages.

    Args:
        file: the file.
        content: open file.
        metadata: metadata of the file, as pyarrow gives it.
        groups: row groups to read.
        columns: top-level columns to read; all if absent.

    Raises:
        DataError: the row groups would take too much memory, or a page header is malformed.
    """
    size = content.seek(0, io.SEEK_END)
    rows, as_dictionary = _ROWS, set()
    for group in groups:
        row_group, largest, held = metadata.row_group(group), 0, 0
        for index in range(row_group.num_columns):
            chunk, leaf = row_group.column(index), metadata.schema.column(index)
            if columns is not None and chunk.path_in_schema.partition(".")[0] not in columns:
                continue
            what = f"column {chunk.path_in_schema[:80]!r} of row group {group}"
            pages = _pages(file, content, chunk, size)
            stored = max(chunk.total_compressed_size, 0)
            check_size(file, f"a page of {what}", pages.largest, pages.largest_stored)
            held += pages.largest + pages.dictionary
            fixed = max(leaf.length or 0, 0) if leaf.physical_type == "FIXED_LEN_BYTE_ARRAY" else _SCALAR
            if leaf.max_repetition_level:
                check_size(file, what, pages.values * fixed, stored)
                check_size(file, what, pages.delta_values * pages.delta, stored)
                if leaf.physical_type == "BYTE_ARRAY" and pages.dictionary_values * pages.dictionary > BUDGET:
                    longest = _longest_text(content, pages, chunk.compression)
                    if pages.dictionary_values * longest > BUDGET:
                        as_dictionary.add(chunk.path_in_schema)
            else:
                of_text = pages.dictionary if leaf.physical_type == "BYTE_ARRAY" else 0
                largest += max(of_text, pages.delta, fixed)
        check_size(file, f"row group {group}", held, size)
        rows = max(1, min(rows, _ROW_BYTES // max(largest, 1)))
        check_size(file, f"a row of row group {group}", largest, size)
    return ParquetSizes(rows, sorted(as_dictionary))


@dataclass
class _Pages:
    """Sizes of the pages of a column in a row group.

    Attributes:
        largest, largest_stored: bytes of the largest page, in memory and in the file.
        dictionary: bytes of the dictionary.
        dictionary_place: first byte of the dictionary in the file, and its size in the file.
        delta: bytes of the largest page with delta-encoded texts, which share prefixes.
        values, dictionary_values, delta_values: number of all values, of values in dictionary-encoded pages, and of
            values in pages with delta-encoded texts.
    """

    largest: int = 0
    largest_stored: int = 0
    dictionary: int = 0
    dictionary_place: tuple[int, int] = (0, 0)
    delta: int = 0
    values: int = 0
    dictionary_values: int = 0
    delta_values: int = 0


def _pages(file: SourceFile, content: BinaryIO, chunk: Any, size: int) -> _Pages:
    found = _Pages()
    position = chunk.data_page_offset
    if chunk.has_dictionary_page and 0 < (chunk.dictionary_page_offset or 0) < position:
        position = chunk.dictionary_page_offset
    # A column without values may have no page.
    end = min(position + max(chunk.total_compressed_size, 0), size) if chunk.num_values else position
    while position < end:
        content.seek(position)
        reader = _Thrift(content)
        try:
            header = reader.struct()
            kind, unpacked, packed = (header[number] for number in (1, 2, 3))
            described = header.get(5) or header.get(8) or {}
            values, encoding = described.get(1, 0), described.get(4 if 8 in header else 2, 0)
            _check_not_negative(unpacked, packed, values)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise DataError(
                f"data.sources: {file.name} is not a readable parquet file (the header of a page at byte {position:,}: "
                f"{error}); write it again, or remove it from the sources"
            ) from error
        position += reader.read + packed
        if unpacked > found.largest:
            found.largest, found.largest_stored = unpacked, packed
        if kind == _DICTIONARY_PAGE:
            found.dictionary += unpacked
            found.dictionary_place = (position - packed, packed)
        elif kind in _DATA_PAGES:
            found.values += values
            if encoding in _DICTIONARY_ENCODINGS:
                found.dictionary_values += values
            elif encoding == _DELTA_BYTE_ARRAY:
                found.delta, found.delta_values = max(found.delta, unpacked), found.delta_values + values
    return found


def _longest_text(content: BinaryIO, pages: _Pages, compression: str) -> int:
    """Bytes of the longest text in a dictionary of checked size; the size of the dictionary if it cannot be parsed."""
    import pyarrow as pa  # type: ignore[import-untyped]

    begin, length = pages.dictionary_place
    content.seek(begin)
    data = content.read(length)
    try:
        if compression != "UNCOMPRESSED":
            data = pa.decompress(data, pages.dictionary, compression.lower(), asbytes=True)
        longest = at = 0
        while at < len(data):
            (size,) = struct.unpack_from("<I", data, at)
            longest, at = max(longest, size), at + 4 + size
    except (pa.ArrowException, ValueError, OSError, struct.error):
        return pages.dictionary
    return longest


def _check_not_negative(*sizes: int) -> None:
    if min(sizes) < 0:
        raise ValueError("a size is negative or points beyond the end of the file")


class _Thrift:
    """Reader of one structure in Thrift's compact protocol, the format of page headers.

    Args:
        content: file, positioned at the first byte of the structure.

    Attributes:
        read: number of bytes read so far.
    """

    def __init__(self, content: BinaryIO) -> None:
        self._content = content
        self.read = 0

    def struct(self, depth: int = 0) -> dict[int, Any]:
        """Read the fields of a structure, by field number; strings and lists are represented by their lengths."""
        if depth > 8:
            raise ValueError("the header is nested too deeply")
        fields: dict[int, Any] = {}
        number = 0
        while byte := self._byte():
            number = number + (byte >> 4) if byte >> 4 else self._whole()
            fields[number] = self._value(byte & 15, depth)
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        match kind:
            case 1 | 2:
                return kind == 1
            case 3:
                return self._byte()
            case 4 | 5 | 6:
                return self._whole()
            case 7:
                return self._skip(8)
            case 8:
                return self._skip(self._varint())
            case 9 | 10:
                head = self._byte()
                count = head >> 4 if head >> 4 < 15 else self._varint()
                for _ in range(count):
                    # A boolean takes a byte as an element of a list, but none as a field of a structure.
                    self._byte() if head & 15 in (1, 2) else self._value(head & 15, depth + 1)
                return count
            case 12:
                return self.struct(depth + 1)
        raise ValueError(f"the header has a field of the unknown type {kind}")

    def _skip(self, count: int) -> int:
        self._count(count)
        self._content.seek(count, io.SEEK_CUR)
        return count

    def _whole(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            if (shift := shift + 7) > 63:
                raise ValueError("the header has a number of more than 64 bits")

    def _byte(self) -> int:
        self._count(1)
        byte = self._content.read(1)
        if not byte:
            raise ValueError("the header is cut off")
        return byte[0]

    def _count(self, count: int) -> None:
        self.read += count
        if self.read > _MAX_PAGE_HEADER:
            raise ValueError(f"the header has more than {_MAX_PAGE_HEADER:,} bytes")


def check_arrow(file: SourceFile, content: BinaryIO) -> None:
    """Raise if a batch of an Arrow stream, which begins at the position of ``content``, takes too much memory.

    Raises:
        DataError: a batch is too large, or the stream is malformed.
    """
    begin = content.tell()
    size = content.seek(0, io.SEEK_END)
    stored = stat_file(file.address).size
    content.seek(begin)
    dictionaries = 0
    try:
        while (message := _message(content)) is not None:
            kind, body, buffers, packed = message
            here = content.tell()
            _check_not_negative(body, size - here - body)
            total = body
            if packed:
                total = sum(_unpacked_size(content, here, offset, length, body) for offset, length in buffers)
            if kind == _DICTIONARY_BATCH:
                dictionaries += total
            what = "a dictionary" if kind == _DICTIONARY_BATCH else "a batch of rows"
            check_size(file, what, dictionaries + (total if kind == _RECORD_BATCH else 0), stored)
            content.seek(here + body)
    except (struct.error, ValueError, IndexError) as error:
        raise DataError(
            f"data.sources: {file.name} is not a readable arrow file ({error}); write it again, or remove it from the "
            "sources"
        ) from error
    content.seek(begin)


def _message(content: BinaryIO) -> tuple[int, int, Sequence[tuple[int, int]], bool] | None:
    """Read an Arrow message: its type, body length, buffers, and whether these are compressed; ``None`` at the end."""
    head = content.read(4)
    if head == b"\xff\xff\xff\xff":
        head = content.read(4)
    if len(head) < 4 or (length := struct.unpack("<i", head)[0]) == 0:
        return None
    if not 0 < length <= _MAX_MESSAGE:
        raise ValueError(f"the metadata of a message has {length:,} bytes, not 1 to {_MAX_MESSAGE:,}")
    data = content.read(length)
    root = _Table(data, struct.unpack_from("<I", data)[0])
    kind, body = root.number(1, "<B"), root.number(3, "<q")
    batch = root.table(2)
    if kind == _DICTIONARY_BATCH and batch is not None:
        batch = batch.table(1)
    if kind not in (_DICTIONARY_BATCH, _RECORD_BATCH) or batch is None:
        return kind, body, (), False
    return kind, body, batch.pairs(2), batch.table(3) is not None


def _unpacked_size(content: BinaryIO, begin: int, offset: int, length: int, body: int) -> int:
    if not length:
        return 0
    if offset < 0 or length < 8 or offset + length > body:
        raise ValueError("a compressed buffer is shorter than 8 bytes or lies outside of its batch")
    content.seek(begin + offset)
    (size,) = struct.unpack("<q", content.read(8))
    return length if size == -1 else max(int(size), 0)


class _Table:
    """Table of a FlatBuffer, the format of Arrow's message metadata."""

    def __init__(self, data: bytes, position: int) -> None:
        self._data, self._position = data, position
        self._fields = position - struct.unpack_from("<i", data, position)[0]
        if self._fields < 0:
            raise ValueError("an offset in the metadata of a message points outside of the metadata")

    def _at(self, field: int) -> int | None:
        (size,) = struct.unpack_from("<H", self._data, self._fields)
        if 4 + 2 * field + 2 > size:
            return None
        (offset,) = struct.unpack_from("<H", self._data, self._fields + 4 + 2 * field)
        return self._position + offset if offset else None

    def number(self, field: int, form: str) -> int:
        """Read the number in a field; 0 if the field is absent."""
        at = self._at(field)
        return 0 if at is None else int(struct.unpack_from(form, self._data, at)[0])

    def table(self, field: int) -> _Table | None:
        at = self._at(field)
        return None if at is None else _Table(self._data, at + struct.unpack_from("<I", self._data, at)[0])

    def pairs(self, field: int) -> list[tuple[int, int]]:
        """Read the vector of pairs of 64-bit numbers in a field."""
        at = self._at(field)
        if at is None:
            return []
        at += struct.unpack_from("<I", self._data, at)[0]
        (count,) = struct.unpack_from("<I", self._data, at)
        if count * 16 > len(self._data):
            raise ValueError("the metadata of a message lists more buffers than it has bytes")
        return [struct.unpack_from("<qq", self._data, at + 4 + 16 * number) for number in range(count)]


def bounded_slices(file: SourceFile, batch: Any, first: int) -> Iterator[tuple[Any, int]]:
    """Yield slices of a table's batch that fit the memory budget as Python values, with their sizes in bytes.

    Args:
        file: the file.
        batch: record batch of pyarrow.
        first: number of the batch's first row.

    Raises:
        DataError: a single row exceeds the budget.
    """
    for begin in range(0, len(batch), _ROWS):
        part = batch.slice(begin, _ROWS)
        if (size := _expanded(file, part)) <= _ROW_BYTES:
            yield part, size
            continue
        for offset in range(len(part)):
            row = part.slice(offset, 1)
            size = _expanded(file, row)
            check_size(file, f"row {first + begin + offset}", size, stat_file(file.address).size)
            yield row, size


def _expanded(file: SourceFile, batch: Any) -> int:
    return sum(_expanded_array(file, batch.schema.names[index], column) for index, column in enumerate(batch.columns))


def _expanded_array(file: SourceFile, name: str, array: Any) -> int:
    """Bytes that an array's values take as Python objects; a dictionary entry counts once for each use."""
    import pyarrow as pa
    import pyarrow.compute as pc  # type: ignore[import-untyped]

    kind = array.type
    types = pa.types
    count = _SCALAR * len(array)
    if isinstance(kind, pa.BaseExtensionType):
        return _expanded_array(file, name, array.storage)
    if types.is_dictionary(kind):
        lengths = _lengths(file, name, array.dictionary)
        return count + (pc.sum(pc.take(lengths, array.indices)).as_py() or 0)
    if types.is_struct(kind):
        # flatten() keeps only the rows of the slice.
        return count + sum(_expanded_array(file, name, field) for field in array.flatten())
    if types.is_map(kind):
        begin, end = (array.offsets[0].as_py(), array.offsets[-1].as_py()) if len(array) else (0, 0)
        parts = (array.keys, array.items)
        return count + sum(_expanded_array(file, name, part.slice(begin, end - begin)) for part in parts)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return count + _expanded_array(file, name, array.flatten())
    if types.is_run_end_encoded(kind):
        runs = array.values.slice(array.find_physical_offset(), array.find_physical_length())
        sizes = [_expanded_array(file, name, runs.slice(index, 1)) for index in range(len(runs))]
        return count + len(array) * max(sizes, default=0)
    if types.is_nested(kind):
        raise DataError(
            f"data.sources: {file.name}: column {name[:80]!r} has the unsupported type {str(kind)[:80]}; write it "
            "with plain types, such as strings, numbers, structs and lists"
        )
    return count + _width(array)


def _width(array: Any) -> int:
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = array.type
    if pa.types.is_fixed_size_binary(kind):
        return int(kind.byte_width) * len(array)
    if _is_text(kind):
        return int(pc.sum(pc.binary_length(array)).as_py() or 0)
    return 0


def _lengths(file: SourceFile, name: str, dictionary: Any) -> Any:
    import pyarrow as pa
    import pyarrow.compute as pc

    if _is_text(dictionary.type):
        return pc.cast(pc.binary_length(dictionary), pa.int64())
    sizes = [_expanded_array(file, name, dictionary.slice(index, 1)) for index in range(len(dictionary))]
    return pa.array(sizes, pa.int64())


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    types = pa.types
    checks: Mapping[str, Any] = vars(types)
    names = ("is_string", "is_binary", "is_large_string", "is_large_binary", "is_string_view", "is_binary_view")
    return any(checks[name](kind) for name in names if name in checks)
