"""Memory of rows and batches before they are read: sizes of columns in Python, and metadata of Arrow messages."""

from __future__ import annotations

import io
import struct
from pathlib import Path
from typing import Any

import pytest
from d9d_core.errors import DataError
from d9d_data.sources import table_sizes
from d9d_data.sources.opening import SourceFile
from d9d_data.sources.table_sizes import _expanded_array, _message, _Table, _unpacked_size, bounded_slices, check_size

pa = pytest.importorskip("pyarrow")

FILE = SourceFile("a.parquet", "parquet")


class Marked(pa.ExtensionType):  # type: ignore[misc] # untyped
    """Type of its own over texts."""

    def __init__(self) -> None:
        super().__init__(pa.string(), "d9d.test.marked")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""


def pairs() -> Any:
    return pa.array([[("k", 1), ("lm", 2)], [], [("nnn", 3)]], pa.map_(pa.string(), pa.int64()))


def runs() -> Any:
    return pa.RunEndEncodedArray.from_arrays(pa.array([2, 5], pa.int32()), pa.array(["abc", "z"]))


@pytest.mark.parametrize(
    ("array", "size"),
    [
        # 16 bytes for each value, and the bytes of texts.
        (pa.array([1, 2, None]), 48),
        (pa.array(["ab", "cde", None]), 48 + 5),
        (pa.array(["é", "cde"], pa.large_string()).slice(0, 1), 16 + 2),
        (pa.array([b"abcd", b"efgh"], pa.binary(4)), 32 + 8),
        (pa.array([b"abc"], pa.binary()), 16 + 3),
        (pa.array([], pa.string()), 0),
        # An entry of a dictionary counts once for each use.
        (pa.DictionaryArray.from_arrays(pa.array([0, 0, 1, None]), pa.array(["aa", "b"])), 64 + 2 + 2 + 1),
        (pa.DictionaryArray.from_arrays(pa.array([0, 1, 1]), pa.array([5, 6])), 48 + 3 * 16),
        (pa.DictionaryArray.from_arrays(pa.array([], pa.int32()), pa.array(["aa"])), 0),
        # Fields and items count in addition to their rows.
        (pa.array([{"a": "xy", "b": 1}, {"a": "", "b": 2}]), 32 + (32 + 2) + 32),
        (pa.array([{"a": "xy", "b": 1}, {"a": "", "b": 2}]).slice(1), 16 + 16 + 16),
        (pa.array([["ab", "c"], []]), 32 + 32 + 3),
        (pa.array([["ab", "c"], ["d"]], pa.large_list(pa.string())).slice(1), 16 + 16 + 1),
        (pa.array([[1, 2], [3, 4]], pa.list_(pa.int64(), 2)), 32 + 64),
        (pairs(), 3 * 16 + (3 * 16 + 6) + 3 * 16),
        (pairs().slice(2), 16 + (16 + 3) + 16),
        (pairs().slice(3), 0),
        # Each row of a run may be as large as the largest one.
        (runs(), 5 * 16 + 5 * (16 + 3)),
        (runs().slice(3, 2), 2 * 16 + 2 * (16 + 1)),
        (runs().slice(5), 0),
        (pa.ExtensionArray.from_storage(Marked(), pa.array(["ab"])), 16 + 2),
    ],
)
def test_the_memory_of_a_column_is_that_of_its_values_in_python(array: Any, size: int) -> None:
    assert _expanded_array(FILE, "a", array) == size


def test_a_column_of_an_unsupported_type_is_named() -> None:
    union = pa.UnionArray.from_sparse(pa.array([0], pa.int8()), [pa.array([1])])
    with pytest.raises(DataError, match=r"a\.parquet: column 'the one' has the unsupported type sparse_union"):
        _expanded_array(FILE, "the one", union)


def test_rows_come_together_up_to_the_budget_and_else_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_sizes, "_ROWS", 2)
    monkeypatch.setattr(table_sizes, "_ROW_BYTES", 34)
    (path := tmp_path / "a.parquet").write_bytes(b"x")
    batch = pa.record_batch({"t": ["a", "b", "c" * 20, "d", "e"]})
    found = [(part["t"].to_pylist(), size) for part, size in bounded_slices(SourceFile.of(str(path)), batch, 100)]
    assert found == [(["a", "b"], 34), (["c" * 20], 36), (["d"], 17), (["e"], 17)]
    monkeypatch.setattr(table_sizes, "BUDGET", 36)
    monkeypatch.setattr(table_sizes, "RATIO", 1)
    assert len(list(bounded_slices(SourceFile.of(str(path)), batch, 100))) == 4
    monkeypatch.setattr(table_sizes, "BUDGET", 35)
    with pytest.raises(DataError, match="row 102 takes 36 bytes in memory but has 1 in the file"):
        list(bounded_slices(SourceFile.of(str(path)), batch, 100))


def test_a_part_may_take_256_mib_or_twenty_times_its_file() -> None:
    check_size(FILE, "a batch", 1 << 28, 0)
    check_size(FILE, "a batch", 20 * (1 << 25), 1 << 25)
    for promised, stored in (((1 << 28) + 1, 0), (20 * (1 << 25) + 1, 1 << 25)):
        with pytest.raises(
            DataError, match=rf"a\.parquet: a batch takes {promised:,} bytes in memory but has {stored:,}"
        ):
            check_size(FILE, "a batch", promised, stored)


def flat(*fields: int, rest: bytes = b"") -> bytes:
    """FlatBuffer table at byte 12, with three offsets of its fields at byte 0."""
    return struct.pack("<5H2xi", 10, 4, *fields, 12) + rest


def test_fields_of_a_table_are_found_by_their_offsets() -> None:
    vector = struct.pack("<I4qi", 2, 3, 5, 7, 9, 0)
    data = flat(4, 0, 8, rest=struct.pack("<iI", 7, 4) + vector)
    table = _Table(data, 12)
    assert [table.number(field, "<i") for field in range(4)] == [7, 0, 4, 0]
    assert table.pairs(2) == [(3, 5), (7, 9)]
    assert (table.pairs(1), table.table(1), table.table(3)) == ([], None, None)
    # A table at byte 16 + 8, with the same offsets of its fields.
    inner = _Table(flat(4, 0, 0, rest=struct.pack("<I4xii", 8, 24, 9)), 12).table(0)
    assert inner is not None
    assert inner.number(0, "<i") == 9


def test_a_message_lists_no_more_buffers_than_it_has_bytes() -> None:
    data = flat(4, 0, 0, rest=struct.pack("<II", 4, 5)) + bytes(56)
    assert len(data) == 5 * 16
    with pytest.raises(struct.error):  # enough bytes in all, but not after the number of buffers
        _Table(data, 12).pairs(0)
    with pytest.raises(ValueError, match="the metadata of a message lists more buffers than it has bytes"):
        _Table(data[:-1], 12).pairs(0)


def test_a_table_begins_inside_of_its_message() -> None:
    with pytest.raises(ValueError, match="an offset in the metadata of a message points outside of the metadata"):
        _Table(struct.pack("<i", 1), 0)
    _Table(struct.pack("<i", 0), 0)


@pytest.mark.parametrize(
    ("offset", "length", "size", "found"),
    [
        (0, 0, 9, 0),
        (0, 8, 1000, 1000),
        (2, 8, -1, 8),
        (2, 8, -5, 0),
        (-1, 8, 9, None),
        (0, 7, 9, None),
        (3, 8, 9, None),
    ],
)
def test_a_compressed_buffer_says_its_size_inside_of_its_batch(
    offset: int, length: int, size: int, found: int | None
) -> None:
    content = io.BytesIO(b"before" + bytes(max(offset, 0)) + struct.pack("<q", size) + b"after")
    if found is None:
        with pytest.raises(
            ValueError, match="a compressed buffer is shorter than 8 bytes or lies outside of its batch"
        ):
            _unpacked_size(content, 6, offset, length, 10)
    else:
        assert _unpacked_size(content, 6, offset, length, 10) == found


def test_a_stream_ends_without_a_message_or_with_an_empty_one() -> None:
    for end in (b"", b"\xff\xff\xff", b"\xff\xff\xff\xff", b"\xff" * 4 + bytes(4), bytes(4)):
        assert _message(io.BytesIO(end)) is None
    for length in (-2, (1 << 26) + 1):
        with pytest.raises(ValueError, match=f"the metadata of a message has {length:,} bytes"):
            _message(io.BytesIO(struct.pack("<i", length)))
    with pytest.raises(struct.error):  # so long may it be, but nothing follows
        _message(io.BytesIO(struct.pack("<i", 1 << 26)))


def test_sizes_below_zero_are_refused() -> None:
    table_sizes._check_not_negative(0, 3)
    for sizes in ((-1, 3), (3, -1)):
        with pytest.raises(ValueError, match="a size is negative"):
            table_sizes._check_not_negative(*sizes)


def measured(path: Path, table: Any, monkeypatch: pytest.MonkeyPatch, budget: int, **written: Any) -> list[str]:
    """Columns of a Parquet file that are read as dictionaries with this budget."""
    pq = pytest.importorskip("pyarrow.parquet")
    pq.write_table(table, path, **written)
    monkeypatch.setattr(table_sizes, "BUDGET", budget)
    monkeypatch.setattr(table_sizes, "RATIO", 1000)
    with path.open("rb") as content:
        metadata = pq.ParquetFile(path).metadata
        return list(table_sizes.parquet_sizes(SourceFile.of(str(path)), content, metadata, [0], None).as_dictionary)


@pytest.mark.parametrize(("budget", "found"), [(300, []), (299, ["a.list.element"])])
def test_lists_of_repeated_texts_are_read_as_dictionaries_beyond_the_budget(
    budget: int, found: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A hundred uses of texts of at most three bytes.
    table = pa.table({"a": [["abc", "z"] * 10] * 5, "b": [1] * 5})
    assert measured(tmp_path / "a.parquet", table, monkeypatch, budget) == found


def test_pages_of_texts_that_share_beginnings_are_measured_by_the_largest(tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    texts = ["x" * (number % 7) + str(number) for number in range(3000)]
    pq.write_table(
        pa.table({"a": texts}), path, use_dictionary=False, column_encoding={"a": "DELTA_BYTE_ARRAY"},
        data_page_size=2000, write_batch_size=100,
    )  # fmt: skip
    with path.open("rb") as content:
        chunk = pq.ParquetFile(path).metadata.row_group(0).column(0)
        found = table_sizes._pages(SourceFile.of(str(path)), content, chunk, path.stat().st_size)
    assert (found.values, found.delta_values, found.dictionary_values) == (3000, 3000, 0)
    assert found.delta == found.largest
    assert 0 < found.delta < chunk.total_uncompressed_size / 2  # of one page of several
