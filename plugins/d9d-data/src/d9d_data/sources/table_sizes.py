"""Sizes that a table's file promises, found before pyarrow allocates anything.

A kilobyte of Parquet or Arrow can stand for gigabytes: pages and buffers are compressed, and a dictionary repeats one
long text in every row. Number of rows say nothing about that, so everything is bounded in bytes.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from d9d_core.errors import DataError

from d9d_data.sources.opening import SourceFile, stat_file

#: Bytes that any file may take at a time.
BUDGET = 1 << 28
#: Bytes that a larger file may take for each byte that it has: texts compress to a tenth.
RATIO = 20
#: Rows in memory at a time, and bytes of several rows: pyarrow has them twice while it appends, and Python once more.
_ROWS, _ROW_BYTES = 256, 1 << 26
#: Bytes of the largest header of a page, and of the largest description of a batch.
_MAX_PAGE_HEADER, _MAX_MESSAGE = 1 << 20, 1 << 26
#: Bytes of a value that is no text, with what Python adds.
_SCALAR = 16
_DICTIONARY_PAGE, _DATA_PAGES = 2, (0, 3)
_DICTIONARY_ENCODINGS, _DELTA_BYTE_ARRAY = (2, 8), 7
_RECORD_BATCH, _DICTIONARY_BATCH = 3, 2


def check_size(file: SourceFile, what: str, promised: int, stored: int) -> None:
    """Refuse a part of a file that takes much more memory than it has bytes.

    Args:
        file: the file.
        what: name of the part, for the message.
        promised: bytes that it would take in memory.
        stored: bytes that it has in the file.

    Raises:
        DataError: it is too large.
    """
    if promised > max(BUDGET, RATIO * stored):
        raise DataError(
            f"data.sources: {file.name}: {what} promises {promised:,} bytes in memory and has {stored:,} in the file; "
            "write the table anew, with smaller row groups or batches, or take the file out of the sources"
        )


@dataclass(frozen=True)
class ParquetSizes:
    """Plan for reading a Parquet file in bounded memory.

    Attributes:
        rows: rows of a batch.
        as_dictionary: columns whose repeated texts stay in their dictionary.
    """

    rows: int
    as_dictionary: Sequence[str]


def parquet_sizes(
    file: SourceFile, content: BinaryIO, metadata: Any, groups: Sequence[int], columns: Sequence[str] | None
) -> ParquetSizes:
    """Sizes of a table's pages in some row groups of a Parquet file.

    Args:
        file: the file.
        content: its bytes.
        metadata: of the file, as pyarrow has it.
        groups: the row groups that are read.
        columns: the columns at the top that are read; all if absent.

    Raises:
        DataError: they promise more memory than the file can be given, or a page has no readable header.
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
        dictionary_place: its first byte in the file, and how many it has there.
        delta: bytes of the largest page whose values repeat parts of each other.
        values, dictionary_values, delta_values: number of all values, and of those in pages of these two kinds.
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
    # Without a value no page is read, and there may be none.
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
                f"data.sources: {file.name} is no readable parquet file (the header of a page at byte {position:,}: "
                f"{error}); write it again, or take it out of the sources"
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
    """Bytes of the longest text in a dictionary, which is small by now; all of its bytes if that is not found out."""
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
        raise ValueError("a size is negative, or leads beyond the end")


class _Thrift:
    """Reader of one structure in Thrift's compact protocol, in which headers of pages are written.

    Args:
        content: stands at its first byte.

    Attributes:
        read: bytes read so far.
    """

    def __init__(self, content: BinaryIO) -> None:
        self._content = content
        self.read = 0

    def struct(self, depth: int = 0) -> dict[int, Any]:
        """Fields of a structure by number; of texts only their lengths."""
        if depth > 8:
            raise ValueError("it is nested too deeply")
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
                    # In a list a truth value is a byte.
                    self._byte() if head & 15 in (1, 2) else self._value(head & 15, depth + 1)
                return count
            case 12:
                return self.struct(depth + 1)
        raise ValueError(f"it has a field of the unknown kind {kind}")

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
                raise ValueError("a number has more than 64 bits")

    def _byte(self) -> int:
        self._count(1)
        byte = self._content.read(1)
        if not byte:
            raise ValueError("it is cut off")
        return byte[0]

    def _count(self, count: int) -> None:
        self.read += count
        if self.read > _MAX_PAGE_HEADER:
            raise ValueError(f"it has more than {_MAX_PAGE_HEADER:,} bytes")


def check_arrow(file: SourceFile, content: BinaryIO) -> None:
    """Check table sizes of an Arrow stream that begins with ``content``: refuse batches that promise too much memory.

    Raises:
        DataError: one does, or the stream is malformed.
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
            f"data.sources: {file.name} is no readable arrow file ({error}); write it again, or take it out of the "
            "sources"
        ) from error
    content.seek(begin)


def _message(content: BinaryIO) -> tuple[int, int, Sequence[tuple[int, int]], bool] | None:
    """Kind and length of the body of a message, its buffers, and whether they are compressed; None at the end."""
    head = content.read(4)
    if head == b"\xff\xff\xff\xff":
        head = content.read(4)
    if len(head) < 4 or (length := struct.unpack("<i", head)[0]) == 0:
        return None
    if not 0 < length <= _MAX_MESSAGE:
        raise ValueError(f"a description of {length:,} bytes")
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
        raise ValueError("a buffer lies outside of its batch")
    content.seek(begin + offset)
    (size,) = struct.unpack("<q", content.read(8))
    return length if size == -1 else max(int(size), 0)


class _Table:
    """Table of a FlatBuffer, in which messages of Arrow are described."""

    def __init__(self, data: bytes, position: int) -> None:
        self._data, self._position = data, position
        self._fields = position - struct.unpack_from("<i", data, position)[0]
        if self._fields < 0:
            raise ValueError("a description leads outside of itself")

    def _at(self, field: int) -> int | None:
        (size,) = struct.unpack_from("<H", self._data, self._fields)
        if 4 + 2 * field + 2 > size:
            return None
        (offset,) = struct.unpack_from("<H", self._data, self._fields + 4 + 2 * field)
        return self._position + offset if offset else None

    def number(self, field: int, form: str) -> int:
        """Number in a field; 0 if it is absent."""
        at = self._at(field)
        return 0 if at is None else int(struct.unpack_from(form, self._data, at)[0])

    def table(self, field: int) -> _Table | None:
        """Table in a field."""
        at = self._at(field)
        return None if at is None else _Table(self._data, at + struct.unpack_from("<I", self._data, at)[0])

    def pairs(self, field: int) -> list[tuple[int, int]]:
        """Vector of pairs of 64-bit numbers in a field."""
        at = self._at(field)
        if at is None:
            return []
        at += struct.unpack_from("<I", self._data, at)[0]
        (count,) = struct.unpack_from("<I", self._data, at)
        if count * 16 > len(self._data):
            raise ValueError("a description has more buffers than bytes")
        return [struct.unpack_from("<qq", self._data, at + 4 + 16 * number) for number in range(count)]


def bounded_slices(file: SourceFile, batch: Any, first: int) -> Iterator[tuple[Any, int]]:
    """Slices of a table's batch whose sizes as values of Python stay within the budget, and these sizes in bytes.

    Args:
        file: the file.
        batch: record batch of pyarrow.
        first: number of its first row.

    Raises:
        DataError: a single row does not.
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
    """Bytes of the values of an array, with those of a dictionary once for each time that they are used."""
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
        # Fields of a slice, without those of other rows.
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
            f"data.sources: {file.name}: column {name[:80]!r} is of type {str(kind)[:80]}, which is not read; write it "
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
