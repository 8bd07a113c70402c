"""Readers of sources, exactly: formats by suffix, ranges of lines, rows of tables, JSON files, and their refusals."""

from __future__ import annotations

import bz2
import csv
import gzip
import hashlib
import io
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from d9d_core.errors import DataError
from d9d_data.config import TextConfig
from d9d_data.sources import document, find, lines, opening, python, records, table_sizes, tables
from d9d_data.sources.document import Piece, texts_of
from d9d_data.sources.opening import FileStat, SourceFile, check_content, open_content, read_blocks, stat_file
from d9d_data.sources.place import Place, Record
from d9d_data.sources.records import columns_of, field_of, read_records, value_in
from pydantic import ValidationError


def rejected() -> tuple[list[tuple[str, str]], Any]:
    """List of rejected records, and the function that rejects."""
    found: list[tuple[str, str]] = []
    return found, lambda place, text: found.append((str(place), text))


# --- files


@pytest.mark.parametrize(
    ("name", "form", "compression"),
    [
        ("a.jsonl", "jsonl", ""), ("a.NDJSON", "jsonl", ""), ("a.json.gz", "json", "gz"), ("a.csv.bz2", "csv", "bz2"),
        ("a.tsv.xz", "tsv", "xz"), ("a.parquet.zst", "parquet", "zst"), ("a.feather", "arrow", ""),
        ("a.arrow", "arrow", ""), ("a.txt", "text", ""), ("a", "text", ""), ("a.gz", "text", "gz"),
        ("a.jsonl.txt", "text", ""), ("a.json.b.gz", "text", "gz"), ("s3://b/a.json.gz", "json", "gz"),
        (".jsonl", "text", ""),
    ],
)  # fmt: skip
def test_suffixes_name_format_and_compression(name: str, form: str, compression: str) -> None:
    file = SourceFile.of(name)
    assert file == SourceFile(name, form, compression)
    assert file.name == name
    assert (SourceFile(name, "text").compression, opening.is_address(name)) == ("", "://" in name)


def test_only_regular_files_are_sources(tmp_path: Path) -> None:
    (path := tmp_path / "a").write_bytes(b"abc")
    found = stat_file(str(path))
    assert found == FileStat(3, str(path.stat().st_mtime_ns))
    with pytest.raises(DataError) as caught:
        stat_file(str(tmp_path))
    assert str(caught.value) == (
        f"data.sources: cannot read {tmp_path}: it is not a regular file; make the file readable or remove it from the "
        "sources"
    )
    with pytest.raises(DataError, match=r"cannot read .*absent: No such file or directory; make"):
        stat_file(str(tmp_path / "absent"))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match=r"data.sources\[0\]: '.*pipe' is no regular file; name a file or a directory"):
        find.find_files([str(tmp_path / "pipe")])


def test_files_at_an_address_are_told_apart_by_the_first_mark_of_their_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    for info, modified in (
        ({"ETag": "", "etag": "e", "mtime": 3}, "e"), ({"created": 5, "mtime": 3}, "3"), ({}, ""),
        ({"ETag": "E", "etag": "e"}, "E"),
    ):  # fmt: skip
        system = SimpleNamespace(info=lambda path, info=info: {"size": "7", "path": path, **info})
        monkeypatch.setattr(opening, "file_system", lambda address, system=system: (system, "b/a"))
        assert stat_file("s3://b/a") == FileStat(7, modified)
    asked: list[Any] = []
    system = SimpleNamespace(cat_file=lambda path, start, end: asked.append((path, start, end)) or b"x")
    monkeypatch.setattr(opening, "file_system", lambda address: (system, "b/a"))
    assert list(read_blocks("s3://b/a", [0, 10], 4)) == [b"x", b"x"]
    assert asked == [("b/a", 0, 4), ("b/a", 10, 14)]


def test_blocks_of_a_file_are_read_where_they_begin(tmp_path: Path) -> None:
    (path := tmp_path / "a").write_bytes(b"0123456789")
    assert list(read_blocks(str(path), [8, 0, 3], 4)) == [b"89", b"0123", b"3456"]


def test_content_may_have_128_mib_or_200_times_the_file() -> None:
    check_content("a", 1 << 27, 0)
    check_content("a", 200 << 20, 1 << 20)
    for content, stored in (((1 << 27) + 1, 0), ((200 << 20) + 1, 1 << 20)):
        with pytest.raises(DataError, match=f"a has {stored:,} bytes but decompresses to more than {content - 1:,}; s"):
            check_content("a", content, stored)


def test_compressed_files_are_limited_and_can_be_read_from_any_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = b"abc\n" * 100
    for module, suffix in ((gzip, "gz"), (bz2, "bz2")):
        path = tmp_path / f"a.txt.{suffix}"
        path.write_bytes(module.compress(data))
        with open_content(SourceFile.of(path)) as content:
            assert (content.readable(), content.seekable()) == (True, True)
            assert content.read(6) == b"abc\nab"
            assert content.seek(0, io.SEEK_CUR) == content.tell() == 6
            assert (content.seek(397), content.read()) == (397, b"bc\n")
            assert (content.seek(0), content.read()) == (0, data)
    monkeypatch.setattr(opening, "CONTENT", 399)
    monkeypatch.setattr(opening, "CONTENT_RATIO", 0)
    with pytest.raises(DataError, match="decompresses to more than 399"):
        list(texts_of(Piece(SourceFile.of(path))))
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(DataError, match=r"a\.txt\.bz2 is damaged or cut off \(.*\); copy it again, or remove it"):
        list(texts_of(Piece(SourceFile.of(path))))


def test_a_missing_library_of_a_compression_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "_ZSTD", "no_such_module_of_zstd")
    with pytest.raises(
        DataError, match=r"^data.sources: a.zst is compressed with zstd: pip install 'd9d-data\[zstd\]'$"
    ):
        opening._zstd("a.zst")
    assert len(opening._damage()) == 4


@pytest.mark.parametrize("source", ["hf:", "hf:  "])
def test_sources_without_a_name_are_refused(source: str) -> None:
    with pytest.raises(ValidationError, match="'hf:' needs the directory of a saved dataset, such as hf:data/train"):
        TextConfig(sources=(source,), sequence_length=8)
    with pytest.raises(ValidationError, match="a source is empty; remove it or give a path"):
        TextConfig(sources=("a", " "), sequence_length=8)
    assert TextConfig(sources=("hf:a", "python:topics"), sequence_length=8).sources == ("hf:a", "python:topics")


def test_hidden_files_of_a_storage_are_left_out_unless_they_are_asked_for() -> None:
    class System:
        names = ("b/x/a", "b/x/.h", "b/x/.d/c", "b/x/d/e")

        def glob(self, path: str, detail: bool) -> dict[str, Any]:
            assert detail
            kinds = ("file", "file", "file", "directory")
            return {name: {"type": kind} for name, kind in zip(self.names, kinds, strict=True)}

        def isfile(self, path: str) -> bool:
            return path == "b/x/.h"

        def find(self, path: str) -> list[str]:
            return list(self.names)

    system = System()
    assert list(find._remote_names(system, "b/x/*")) == ["b/x/a", "b/x/.d/c"]
    assert list(find._remote_names(system, "b/x/.*")) == ["b/x/a", "b/x/.h", "b/x/.d/c"]
    assert list(find._remote_names(system, "b/x/.h")) == ["b/x/.h"]
    assert list(find._remote_names(system, "b/x/")) == ["b/x/a", "b/x/d/e"]


def test_errors_of_a_storage_that_name_the_fault_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    def names(*_: Any) -> Any:
        raise DataError("it is full")

    monkeypatch.setattr(find, "file_system", lambda source: (None, source))
    monkeypatch.setattr(find, "_remote_names", names)
    with pytest.raises(DataError, match="^it is full$"):
        find._remote_files("s3://b", "here", print)
    system = SimpleNamespace(unstrip_protocol=lambda name: f"s3://{name}")
    monkeypatch.setattr(find, "file_system", lambda source: (system, source))
    monkeypatch.setattr(find, "_remote_names", lambda *_: iter(["b", "a"]))
    assert find._remote_files("s3://b", "here", print) == ["s3://a", "s3://b"]


def test_installed_files_of_python_are_sources_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"^data.sources: a.py is not valid Python \(.*\)"):
        python.docstrings_in(b"def f(:", "a.py")
    assert python.docstrings_in(b'"""One."""\ndef f():\n    """Two."""\n', "a.py").split() == ["One.", "Two."]
    monkeypatch.setattr(document.python, "topics", lambda: ("ab", "c"))
    assert document.topics_digest() == hashlib.sha256(b"2 ab1 c").hexdigest()


# --- lines


@pytest.fixture
def numbers(tmp_path: Path) -> SourceFile:
    """File of four lines, with blanks, a wrong line and a list."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"t": 1}\n\n  \n{"t": \n[1]\n{"t": 2}')
    return SourceFile.of(path)


def test_lines_that_are_no_objects_are_rejected_and_blank_lines_are_left_out(numbers: SourceFile) -> None:
    found, reject = rejected()
    read = list(lines.read_json_lines(numbers, reject=reject))
    assert [(record.values, record.place.exact()) for record in read] == [
        ({"t": 1}, f"{numbers.name}:1"), ({"t": 2}, f"{numbers.name}:6"),
    ]  # fmt: skip
    (first, why), second = found
    assert first == f"{numbers.name}:4"
    assert why.startswith("is not JSON (")
    assert why.endswith("); write one object per line")
    assert second == (f"{numbers.name}:5", 'has no fields (it is a list); write lines such as {"text": "..."}')


@pytest.mark.parametrize(
    ("begin", "end", "found"),
    [
        (0, None, ["ab", "c", "", "def"]), (0, 3, ["ab"]), (0, 4, ["ab", "c"]), (1, None, ["c", "", "def"]),
        (3, None, ["c", "", "def"]), (4, 6, [""]), (4, 5, []), (6, None, ["def"]), (7, None, []), (5, 6, [""]),
        (0, 0, []),
    ],
)  # fmt: skip
def test_each_line_belongs_to_the_range_in_which_it_begins(
    begin: int, end: int | None, found: list[str], tmp_path: Path
) -> None:
    (path := tmp_path / "a").write_bytes(b"ab\nc\n\ndef")
    read = list(lines.read_lines(SourceFile.of(path), begin, end))
    assert [line.content.decode().rstrip("\n") for line in read] == found
    assert [line.number for line in read] == list(range(1, len(found) + 1))


@pytest.mark.parametrize("block", [1, 2, 100])
def test_lines_beyond_the_limit_are_rejected_and_the_next_is_read(
    block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "MAX_LINE", 4)
    monkeypatch.setattr(lines, "_BLOCK", block)
    (path := tmp_path / "a").write_bytes(b"abc\nabcd\nabcdefg\nxyz\nabcde")
    found, reject = rejected()
    read = [line.content for line in lines.read_lines(SourceFile.of(path), 0, 18, reject)]
    assert read == [b"abc\n", b"xyz\n"]
    told = "has more than 4 bytes; split it into several, or use another format"
    assert found == [(f"{path}:{number}", told) for number in (2, 3)]
    found.clear()
    assert [line.content for line in lines.read_lines(SourceFile.of(path), 10, None, reject)] == [b"xyz\n"]
    assert [text for _, text in found] == [told]


def table(path: Path, content: bytes) -> tuple[list[tuple[dict[str, str], str]], list[tuple[str, str]]]:
    path.write_bytes(content)
    found, reject = rejected()
    read = [(dict(record.values), str(record.place)) for record in lines.read_csv(SourceFile.of(path), reject)]
    return read, found


def test_rows_of_a_table_have_the_columns_of_the_first(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    content = b'\xef\xbb\xbfa,b\n1,2\n\n"x\ny",3\n4\n5,\xff\n6,"7" 8\n9,"10"\n'
    read, found = table(path, content)
    assert read == [
        ({"a": "1", "b": "2"}, f"{path}:2"), ({"a": "x\ny", "b": "3"}, f"{path}:4"),
        ({"a": "9", "b": "10"}, f"{path}:9"),
    ]  # fmt: skip
    assert found[:2] == [
        (f"{path}:6", "has 1 values, but the table has 2 columns (a, b); quote values that hold the separator or a "
                      "line end"),
        (f"{path}:7", "is not UTF-8 text; convert the file"),
    ]  # fmt: skip
    ((place, why),) = found[2:]
    assert place == f"{path}:8"
    assert why.startswith("is not a row of a table (")
    tabs = tmp_path / "a.tsv"
    assert table(tabs, b"a\tb,c\n1\t2\n")[0] == [({"a": "1", "b,c": "2"}, f"{tabs}:2")]
    assert (table(path, b"")[0], table(path, b"\n\na\n1\n")[0]) == ([], [({"a": "1"}, f"{path}:4")])


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"a,b,a\n1,2,3\n", r":1 names a column twice \(a, b, a\); repair the first row"),
        (b"a,\xff\n1,2\n", r":1 is not UTF-8 text \(a, \?\); repair the first row"),
        (b'a,"b" c\n1,2\n', r":1 is not a row of a table \(.*\); quote values as in RFC 4180"),
    ],
)
def test_the_first_row_of_a_table_is_needed(content: bytes, why: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=why):
        table(tmp_path / "a.csv", content)


def test_columns_are_those_of_the_first_row_with_values(tmp_path: Path) -> None:
    (path := tmp_path / "a.csv").write_bytes(b"\n\na,b\n1,2\n")
    assert columns_of(path) == ["a", "b"]
    path.write_bytes(b"")
    assert columns_of(path) == []
    path.write_bytes(b'a,"b" c\n')
    with pytest.raises(DataError, match=r"^data.sources: the first line of .*a.csv is not a row of a table \("):
        columns_of(path)
    (path := tmp_path / "a.jsonl").write_text('{"c": 1, "d": 2}\n{"e": 3}\n')
    assert columns_of(str(path)) == ["c", "d"]


# --- records


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ([{"a": 1}, 3, {"b": 2}], [1, 3]),
        ({"data": [{"a": 1}], "more": [{}, {}]}, [1]),
        ({"rows": [{"a": 1}, {}], "x": 3}, [1, 2]),
        ([], []),
    ],
)
def test_a_json_file_is_a_list_or_has_one(value: Any, found: list[int], tmp_path: Path) -> None:
    (path := tmp_path / "a.json").write_text(json.dumps(value))
    wrong, reject = rejected()
    assert [str(record.place) for record in read_records(path, reject=reject)] == [
        f"{path} record {number}" for number in found
    ]
    told = [(f"{path} record 2", "has no fields (it is a number); write objects")]
    assert wrong == (told if isinstance(value, list) and value else [])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"a": [1], "b": [2]}', r"is one object with the fields a, b, but not a list of records"),
        ("{}", r"is one object with the fields \(none\), but not"),
        ("3", "contains a number, not a list of records; write a list of objects"),
        ('{"data": 3, "x": 1}', "is one object with the fields data, x, but not"),
        ("[1", r"is not JSON \(.*\); repair it"),
    ],
)
def test_other_json_files_are_refused(text: str, why: str, tmp_path: Path) -> None:
    (path := tmp_path / "a.json").write_text(text)
    with pytest.raises(DataError, match=rf"^data.sources: {path} {why}"):
        list(read_records(path))


def test_json_files_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path := tmp_path / "a.json").write_text('[{"a":1}]')
    monkeypatch.setattr(records, "MAX_JSON_FILE", 9)
    assert len(list(read_records(path))) == 1
    monkeypatch.setattr(records, "MAX_JSON_FILE", 8)
    with pytest.raises(DataError, match="has more than 8 bytes of JSON in one piece; write it as .jsonl"):
        list(read_records(path))
    with pytest.raises(DataError, match=r"^data.sources: a.txt is plain text without fields; use a .jsonl, .csv"):
        read_records("a.txt")


def test_values_are_found_by_name_or_by_the_names_of_nested_fields() -> None:
    values = {"a.b": 1, "a": {"b": 2, "c": {"d": 3}, "e": None}, "n": None, "l": [1]}
    paths = ("a.b", "a.c.d", "a.e", "a.e.f", "n", "x", "l.0", "a.c", "a.x.y")
    assert [value_in(values, path) for path in paths] == [1, 3, None, None, None, None, None, {"d": 3}, None]
    record = Record(values, Place(SourceFile("a.jsonl", "jsonl"), 1))
    assert [field_of(record, names) for names in (("x", "a.c.d"), ("n", "x"), ("a", "a.b"))] == ["a.c.d", "n", "a"]


@pytest.mark.parametrize(
    ("field", "column"), [(None, None), ("a", "a"), ("a.b", "a"), ("x.y", None), ("c.d", "c.d"), ("x", None)]
)
def test_only_the_column_of_a_field_is_read(
    field: str | None, column: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "table_columns", lambda _file: ["a", "c.d", "c"])
    assert records._column_of(SourceFile("a.parquet", "parquet"), field) == column


# --- documents


def test_a_compressed_text_has_a_limit_that_grows_with_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path := tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"x" * 100))
    file = SourceFile.of(path)
    size = path.stat().st_size
    for budget, ratio, most, limit in (
        (100, 0, 1000, None), (99, 0, 1000, 99), (0, 1, 1000, size), (0, 100, 1000, None), (500, 0, 100, None),
        (500, 0, 99, 99),
    ):  # fmt: skip
        for name, value in (("BUDGET", budget), ("RATIO", ratio), ("MAX_COMPRESSED_TEXT", most)):
            monkeypatch.setattr(document, name, value)
        if limit is None:
            assert list(texts_of(Piece(file))) == ["x" * 100]
        else:
            with pytest.raises(DataError, match=f"has a text of more than {limit} bytes, too long"):
                list(texts_of(Piece(file)))


def test_a_text_that_is_not_utf_8_is_rejected_with_its_place(tmp_path: Path) -> None:
    (path := tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfabc")
    assert list(texts_of(Piece(SourceFile.of(path)))) == ["abc"]
    path.write_bytes(b"abc\xff")
    found, reject = rejected()
    assert list(texts_of(Piece(SourceFile.of(path)), reject)) == []
    ((place, why),) = found
    assert (place, why.partition(";")[0]) == (str(path), "is not UTF-8 text (byte 3: invalid start byte)")


def test_structured_files_are_told_from_texts() -> None:
    document.check_structured(SourceFile("a.jsonl", "jsonl"), "pairs")
    with pytest.raises(DataError) as caught:
        document.check_structured(SourceFile("a.txt", "text"), "pairs")
    assert str(caught.value) == (
        "data.sources: a.txt has no records with fields, but pairs are records; name files of the formats .arrow, "
        ".csv, .json, .jsonl, .parquet, .tsv, or use the dataset text"
    )
    document.check_field(SourceFile("a.txt", "text"), None)
    document.check_field(SourceFile("a.jsonl", "jsonl"), "text")


def test_a_column_that_a_table_lacks_is_an_error_though_malformed_records_are_skipped(tmp_path: Path) -> None:
    (path := tmp_path / "a.csv").write_text("text,b\nx,y\n")
    _, reject = rejected()
    assert list(texts_of(Piece(SourceFile.of(path), "b"), reject)) == ["y"]
    with pytest.raises(
        DataError, match=r"^data.field: .*a.csv has no column 'c.d' \(it has text, b; 'text' looks right"
    ):
        list(texts_of(Piece(SourceFile.of(path), "c.d"), reject))


# --- tables


def test_a_saved_dataset_lists_its_files(tmp_path: Path) -> None:
    def files() -> list[str]:
        return tables.saved_dataset_files(str(tmp_path))

    def refused(why: str) -> None:
        with pytest.raises(DataError, match=why):
            files()

    refused("is not a dataset saved by 'datasets': it has no state.json; name a directory that save_to_disk wrote")
    state = tmp_path / "state.json"
    for value in ([], {}, {"_data_files": []}, {"_data_files": "x"}):
        state.write_text(json.dumps(value))
        refused("its state.json lists no data files; save the dataset again")
    (tmp_path / "a.arrow").touch()
    (tmp_path / "b.arrow").touch()
    state.write_text(json.dumps({"_data_files": [{"filename": "b.arrow"}, {"filename": "a.arrow"}]}))
    assert files() == [str(tmp_path / "b.arrow"), str(tmp_path / "a.arrow")]
    for entry in ("a.arrow", {"filename": 3}, {"filename": f"../{tmp_path.name}/a.arrow"}, {"filename": "c.arrow"}, {}):
        state.write_text(json.dumps({"_data_files": [entry]}))
        refused("its state.json lists '.*', which is not a file in the directory; copy the directory again")
    state.write_text(json.dumps({"_data_files": [{"filename": "x" * 81}]}))
    refused(f"lists '{'x' * 80}', which")
    state.write_text("{")
    refused("cannot read .*state.json: .*; save the dataset again")
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    refused(f"holds several splits; name one: hf:{tmp_path}/train, hf:{tmp_path}/test$")
    (tmp_path / "dataset_dict.json").write_text("{}")
    refused("holds several splits; name one: its splits$")


def test_row_groups_and_columns_are_read_alone_and_rows_are_numbered_in_the_file(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = pa.table({"a": list(range(5)), "b": [{"c": number} for number in range(5)]})
    pq.write_table(rows, tmp_path / "a.parquet", row_group_size=2)
    file = SourceFile.of(tmp_path / "a.parquet")

    def read(*given: Any) -> list[tuple[str, list[int]]]:
        found = tables.read_table(file, *given)
        return [(str(record.place).rpartition(" ")[2], [*record.values.values()][:1]) for record in found]

    assert read() == [(str(number + 1), [number]) for number in range(5)]
    assert read(1) == [("3", [2]), ("4", [3]), ("5", [4])]
    assert read(1, 2) == [("3", [2]), ("4", [3])]
    assert read(2, 2) == []
    assert read(0, 1, "b") == [("1", [{"c": 0}]), ("2", [{"c": 1}])]
    assert (tables.table_columns(file), len(tables.row_group_sizes(file))) == (["a", "b"], 3)
    for name, make in (("a.arrow", pa.ipc.new_file), ("b.arrow", pa.ipc.new_stream)):
        with make(str(tmp_path / name), rows.schema) as out:
            out.write_table(rows, max_chunksize=2)
        file = SourceFile.of(tmp_path / name)
        assert read() == [(str(number + 1), [number]) for number in range(5)]
        assert read(0, None, "b")[3] == ("4", [{"c": 3}])
        assert tables.table_columns(file) == ["a", "b"]


def test_rows_of_small_files_do_not_stand_for_a_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({"a": ["xy"] * 4}), path := tmp_path / "a.parquet")
    monkeypatch.setattr(table_sizes, "_ROWS", 1)
    monkeypatch.setattr(opening, "CONTENT_RATIO", 0)
    monkeypatch.setattr(opening, "CONTENT", 18 * 3)
    found = tables.read_table(SourceFile.of(path))
    assert [next(found).values["a"] for _ in range(3)] == ["xy"] * 3
    with pytest.raises(DataError, match="decompresses to more than 54"):
        next(found)


def test_nulls_that_a_type_adds_are_left_out() -> None:
    pa = pytest.importorskip("pyarrow")
    inner = pa.struct({"x": pa.int64(), "y": pa.string()})
    cases = [
        (None, inner, None), ({"x": 1, "y": None}, inner, {"x": 1}),
        ([{"x": None, "y": "a"}, None], pa.list_(inner), [{"y": "a"}, None]),
        ([("k", {"x": 1, "y": None})], pa.map_(pa.string(), inner), {"k": {"x": 1}}),
        ({"o": {"x": None, "y": None}}, pa.struct({"o": inner}), {"o": {}}), ("a", pa.string(), "a"),
        ({"x": 1, "y": None}, pa.dictionary(pa.int32(), inner), {"x": 1}),
    ]  # fmt: skip
    for value, kind, written in cases:
        assert tables._written(value, kind) == written


def test_a_damaged_page_is_named_by_its_place(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({"a": [1, 2, 3]}), path := tmp_path / "a.parquet", use_dictionary=False)
    data = bytearray(path.read_bytes())
    data[4] = 0x1D  # no page header has a field of type 13
    path.write_bytes(data)
    with pytest.raises(
        DataError, match=r"is not a readable parquet file \(the header of a page at byte 4: the header has"
    ):
        list(read_records(path))


@pytest.mark.parametrize("place", [7, 9], ids=["unpacked", "packed"])
def test_a_page_of_a_negative_size_is_named_by_its_place(tmp_path: Path, place: int) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table, path = pa.table({"a": [1, 2, 3]}), tmp_path / "a.parquet"
    pq.write_table(table, path, use_dictionary=False, compression="none", write_statistics=False)
    data = bytearray(path.read_bytes())
    assert data[4:7] == b"\x15\x00\x15"  # a page of data; the size follows, its last bit is the sign
    data[place] |= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"\(the header of a page at byte 4: a size is negative or"):
        list(read_records(path))


@pytest.mark.parametrize(
    ("budget", "said"),
    [
        (103, "a page of column 'a' of row group 0 takes 104 bytes in memory but has "),
        (207, "row group 0 takes 208 bytes in memory but has {size} in the file; write the table again"),
        (299, "row group 1 takes 312 bytes in memory but has {size} in the file; write the table again"),
        (312, None),
    ],
)
def test_parts_of_a_table_beyond_the_budget_are_named_with_their_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget: int, said: str | None
) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [{"a": "x" * 100, "b": "y" * 100}, {"a": "x" * 152, "b": "y" * 152}]  # and four bytes for each length
    table, path = pa.Table.from_pylist(rows, pa.schema({"a": pa.string(), "b": pa.string()})), tmp_path / "a.parquet"
    table = table.cast(pa.schema([pa.field(name, pa.string(), nullable=False) for name in "ab"]))
    pq.write_table(table, path, use_dictionary=False, compression="none", row_group_size=1, data_page_version="1.0")
    monkeypatch.setattr(table_sizes, "BUDGET", budget)
    monkeypatch.setattr(table_sizes, "RATIO", 0)
    if said is None:
        assert [record.values for record in read_records(path)] == rows
        return
    with pytest.raises(DataError) as caught:
        list(read_records(path))
    expected = f"data.sources: {path}: " + said.format(size=f"{path.stat().st_size:,}")
    assert str(caught.value).startswith(expected)


def test_a_row_of_texts_of_fixed_length_counts_although_it_has_no_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"a": pa.array([None], pa.binary(5000)), "b": pa.array([None], pa.binary(1))}), path)
    monkeypatch.setattr(table_sizes, "RATIO", 0)
    monkeypatch.setattr(table_sizes, "BUDGET", 5000)
    with pytest.raises(DataError, match=r"a\.parquet: a row of row group 0 takes 5,001 bytes in memory but has "):
        list(read_records(path))
    monkeypatch.setattr(table_sizes, "BUDGET", 5001)
    assert len(list(read_records(path))) == 1


def test_a_process_keeps_its_larger_limit_of_columns(tmp_path: Path) -> None:
    kept = csv.field_size_limit(2**41)
    try:
        assert table(tmp_path / "a.csv", b"a\n1\n")[0][0][0] == {"a": "1"}
        assert csv.field_size_limit() == 2**41
    finally:
        csv.field_size_limit(kept)
