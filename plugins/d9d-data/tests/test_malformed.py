"""Structured files that are malformed, damaged or made to harm: an error that names the place, or counted."""

from __future__ import annotations

import bz2
import gzip
import itertools
import json
import lzma
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from d9d_core.errors import DataError
from d9d_data.sources.opening import SourceFile, open_content

ZSTD = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
pa, parquet, zstd = map(pytest.importorskip, ["pyarrow", "pyarrow.parquet", ZSTD])


def texts(stream: Any) -> list[str]:
    tokens, starts = stream._corpus.tokens.tolist(), stream._corpus.starts.tolist()
    return [bytes(tokens[a : b - 1]).decode() for a, b in itertools.pairwise(starts)]


def table(path: Path, **columns: list[Any]) -> Path:
    parquet.write_table(pa.table(columns), path)
    return path


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n\n{text}', r"a\.jsonl:3 is not JSON \("),
        ("a.jsonl", b'{"text": "x"}\n"text"', r"a\.jsonl:2 has no fields \(it is a string\)"),
        ("a.jsonl", b'{"body": "x", "id": 1}', r"a\.jsonl:1 has no text in a field 'text' \(it has body, id\); write"),
        ("a.jsonl", b'{"text": null}', r"a\.jsonl:1 has no text in .* it is empty there"),
        ("a.jsonl", b'{"text": 3}', r"a\.jsonl:1 has no text in .* it is a number there"),
        ("a.jsonl", b'{"text": "\xe9"}', r"a\.jsonl:1 is not JSON \(.*can't decode"),
        ("a.json", b'[{"text": "x"}, 7]', r"a\.json record 2 has no fields \(it is a number\)"),
        ("a.csv", b"id,text\n1,x\n2,\xe9\n", r"a\.csv:3 is not UTF-8 text"),
        ("a.csv", b"id,text\n1,x\n2\n", r"a\.csv:3 has 1 values, but the table has 2 columns \(id, text\)"),
        ("a.csv", b'id,text\n1,x\n2,"a"b\n', r"a\.csv:3 is not a row of a table \("),
        ("a.txt", b"caf\xe9", r"a\.txt is not UTF-8 text \(byte 3"),
    ],
)
def test_malformed_documents_are_named_or_left_out(
    name: str, content: bytes, message: str, tmp_path: Path, open_stream: Any
) -> None:
    (tmp_path / name).write_bytes(content)
    (tmp_path / "z.txt").write_text("a text that is fine")
    sources = (tmp_path / name, tmp_path / "z.txt")
    with pytest.raises(DataError, match=rf"^data\.sources: .*{message}"):
        open_stream(*sources, field="text", sequence_length=4)
    notes: list[str] = []
    for _ in range(2):  # the second finds it prepared
        stream = open_stream(*sources, field="text", sequence_length=4, malformed="skip", note=notes.append)
        assert stream.facts["skipped"] == 1
        assert texts(stream)[-1] == "a text that is fine"
    found = [note for note in notes if "left out" in note]
    assert len(found) == 2
    assert all(note.startswith("left out 1 malformed documents; the first: ") for note in found)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b"[1", r"a\.json is not JSON"),
        ("a.json", b"7", r"a\.json contains a number, not a list of records; write a list of objects"),
        ("a.json", b'{"a": [], "b": []}', r"a\.json is one object with the fields a, b"),
        ("a.json", b"[" * 10**5, r"a\.json is not JSON \(the JSON is nested more than 200 levels deep"),
        ("a.csv", b"text,id,text\n1,2,3\n", r"a\.csv:1 names a column twice \(text, id, text\)"),
        ("a.csv", b"text,\xe9\n1,2\n", r"a\.csv:1 is not UTF-8 text"),
        (
            "a.csv",
            b"id,body\n1,2\n",
            r"^data\.field: .*a\.csv has no column 'text' \(it has id, body; 'body' looks right",
        ),
        ("a.tsv", b"title\tabstract\nx\tlonger\n", r"a\.tsv has no column 'text' \(it has .*; 'abstract' looks right"),
        ("a.parquet", b"PAR1 and nothing", r"a\.parquet is not a readable parquet file \("),
        ("a.arrow", b"ARROW1 and nothing", r"a\.arrow is not a readable arrow file \("),
        ("a.arrow", b"", r"a\.arrow is not a readable arrow file \("),
    ],
)
@pytest.mark.parametrize("malformed", ["error", "skip"])
def test_files_that_cannot_be_read_at_all_are_errors(
    name: str, content: bytes, message: str, malformed: str, tmp_path: Path, open_stream: Any
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        open_stream(tmp_path / name, field="text", malformed=malformed)


@pytest.mark.thorough
def test_columns_without_text_are_errors_that_name_the_row(tmp_path: Path, open_stream: Any) -> None:
    with pytest.raises(DataError, match=r"a\.parquet row 2 has no text in a field 'text' .* it is empty there"):
        open_stream(table(tmp_path / "a.parquet", text=["x", None]), field="text")
    with pytest.raises(DataError, match=r"b\.parquet row 1 has no text in a field 'text' .* it is empty there"):
        open_stream(table(tmp_path / "b.parquet", text=[None, None]), field="text")
    with pytest.raises(DataError, match=r"c\.parquet row 1 has no text in a field 'id' .* it is a number there"):
        open_stream(table(tmp_path / "c.parquet", id=[1]), field="id")
    with pytest.raises(DataError, match="the corpus is empty"):
        open_stream(table(tmp_path / "d.parquet", text=pa.array([], pa.string())), field="text")


def test_a_column_whose_text_is_not_utf8_is_an_error(tmp_path: Path, open_stream: Any) -> None:
    column = pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xe9")])
    with pytest.raises(DataError, match=r"a\.parquet is not a readable parquet file \(.*utf-8"):
        open_stream(table(tmp_path / "a.parquet", text=column), field="text")


def test_hostile_files_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, open_stream: Any) -> None:
    monkeypatch.setattr("d9d_data.sources.lines.MAX_LINE", 1000)
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "short"}\n' + '{"text": "' + "x" * 3000 + '"}\n{"text": "and fine"}')
    with pytest.raises(DataError, match=r"a\.jsonl:2 has more than 1,000 bytes; split it"):
        open_stream(file, field="text")
    stream = open_stream(file, field="text", malformed="skip", sequence_length=4)
    assert (texts(stream), stream.facts["skipped"]) == (["short", "and fine"], 1)
    (tmp_path / "a.csv").write_text("text\n" + "x" * 3000)
    with pytest.raises(DataError, match=r"a\.csv:2 has more than 1,000 bytes"):
        open_stream(tmp_path / "a.csv", field="text", malformed="skip")
    monkeypatch.setattr("d9d_data.sources.records.MAX_JSON_FILE", 1000)
    (tmp_path / "a.json").write_text(json.dumps(["x" * 3000]))
    with pytest.raises(DataError, match=r"a\.json has more than 1,000 bytes of JSON in one piece; write it as \.jsonl"):
        open_stream(tmp_path / "a.json", field="text")
    monkeypatch.setattr("d9d_data.sources.document.MAX_COMPRESSED_TEXT", 1000)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"x" * 3000))
    with pytest.raises(DataError, match=r"a\.txt\.gz has a text of more than 1,000 bytes"):
        open_stream(tmp_path / "a.txt.gz")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("suffix", "compress"),
    [("gz", gzip.compress), ("bz2", bz2.compress), ("xz", lzma.compress), ("zst", zstd.compress)],
)
def test_a_small_file_of_much_data_is_decompressed_piece_by_piece(
    suffix: str, compress: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    file = tmp_path / f"a.txt.{suffix}"
    file.write_bytes(compress(bytes(1 << 26)))
    assert file.stat().st_size < 1 << 17
    tracemalloc.start()
    try:
        with open_content(SourceFile.of(file)) as content:
            assert content.read(10) == bytes(10)
        assert tracemalloc.get_traced_memory()[1] < 1 << 24  # xz has a dictionary of 8 MiB
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("missing", "name", "extra"), [("pyarrow", "a.parquet", "tables"), (ZSTD, "a.jsonl.zst", "zstd")]
)
def test_a_missing_library_is_named(
    missing: str, name: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, open_stream: Any
) -> None:
    (tmp_path / name).write_bytes(b"x")
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(DataError, match=rf"pip install 'd9d-data\[{extra}\]'"):
        open_stream(tmp_path / name, field="text")
