"""Small files that stand for gigabytes: read in bounded memory, or refused with the size that they promise."""

from __future__ import annotations

import bz2
import gzip
import lzma
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from d9d_core.extend import DataError
from d9d_data.sources.records import read_records

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

#: MiB that reading any of these files may take, beside Python and pyarrow.
MOST = 700
LONG = "a" * 20_000_000
READ = """
import resource, sys, threading
import pyarrow, pyarrow.compute, pyarrow.parquet
from d9d_core.extend import DataError
from d9d_data.sources.document import Piece, texts_of
from d9d_data.sources.opening import SourceFile
from d9d_data.sources.records import read_records
name = sys.argv[1]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    file = SourceFile.of(name)
    read = texts_of(Piece(file)) if file.format == "text" else read_records(file)
    said = "read " + str(sum(1 for _ in zip(range(2), read)))
except DataError as error:
    said = str(error)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
print(said)
"""


def parquet(table: Any, **options: Any) -> Callable[[Path], None]:
    return lambda path: pq.write_table(pa.table(table()), path, compression="zstd", **options)


def arrow(table: Any, compression: str = "zstd", stream: bool = False) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        made = pa.table(table())
        new = pa.ipc.new_stream if stream else pa.ipc.new_file
        with new(str(path), made.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as out:
            out.write_table(made)

    return write


def repeated(rows: int, text: str) -> Any:
    return pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array([text]))


def many(values: Any, count: int) -> Any:
    return pa.FixedSizeListArray.from_arrays(values, count)


def compressed(module: Any, *parts: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        with module.open(path, "wb") as out:
            for part in parts:
                out.write(part)

    return write


#: Name of a file -> how it is made, and what must be said of it; an empty text for those that are read.
BOMBS: dict[str, tuple[Callable[[Path], None], str]] = {
    "dictionary.parquet": (parquet(lambda: {"text": [LONG] * 50}, dictionary_pagesize_limit=1 << 30), ""),
    "page.parquet": (parquet(lambda: {"text": ["a" * 900_000_000]}, use_dictionary=False), "promises 900,000,0"),
    "delta.parquet": (
        parquet(
            lambda: {"text": ["a" * 3_000_000] * 300}, use_dictionary=False, data_page_size=1 << 30,
            column_encoding={"text": "DELTA_BYTE_ARRAY"},
        ),
        "",
    ),
    "lists.parquet": (
        parquet(lambda: {"messages": [["a" * 100_000] * 20_000]}, dictionary_pagesize_limit=1 << 30),
        "row 1 promises 2,000,320,0",
    ),
    "structs.parquet": (
        parquet(
            lambda: {"messages": [[{"role": "user", "content": "a" * 100_000}] * 20_000]},
            dictionary_pagesize_limit=1 << 30,
        ),
        "row 1 promises 2,00",
    ),
    "numbers.parquet": (
        parquet(lambda: {"n": many(pa.array([0] * 60_000_000, pa.int8()), 60_000_000)}), "promises 960,000,000",
    ),
    "dictionary.arrow": (arrow(lambda: {"text": repeated(256, LONG)}), ""),
    "dictionary.feather": (arrow(lambda: {"text": repeated(256, LONG)}, "lz4"), ""),
    "dictionary-stream.arrow": (arrow(lambda: {"text": repeated(256, LONG)}, stream=True), ""),
    "buffer.arrow": (arrow(lambda: {"text": ["a" * 900_000_000]}), "promises 900,000,008"),
    "dictionary-buffer.arrow": (arrow(lambda: {"text": repeated(2, "a" * 900_000_000)}), "promises 900,000,008"),
    "nulls.arrow": (arrow(lambda: {"x": many(pa.nulls(1_000_000_000), 1_000_000_000)}), "row 1 promises 16,000,000,0"),
    "lists.arrow": (
        arrow(lambda: {"x": pa.ListArray.from_arrays(pa.array([0, 100], pa.int32()), repeated(100, LONG))}),
        "row 1 promises 2,000,0",
    ),
    "runs.arrow": (
        arrow(lambda: {"x": many(pa.RunEndEncodedArray.from_arrays(pa.array([100], pa.int32()), [LONG]), 100)}),
        "row 1 promises 2,000,0",
    ),
    "line.jsonl.gz": (compressed(gzip, *[b"0" * (1 << 24)] * 80), "more than"),
    "line.jsonl.bz2": (compressed(bz2, *[b"0" * (1 << 24)] * 8), "more than"),
    "line.jsonl.xz": (compressed(lzma, *[b"0" * (1 << 24)] * 8), "more than"),
    "values.jsonl.gz": (compressed(gzip, b'{"a": [', *[b"[]," * (1 << 20)] * 20, b"[]]}\n"), "8,388,608 values"),
    "values.json.gz": (compressed(gzip, b"[", *[b"[]," * (1 << 20)] * 60, b"[]]"), "more than 8,388,608 values"),
    "text.txt.gz": (compressed(gzip, *[b"a" * (1 << 24)] * 40), "a text of more than 268,435,456 bytes"),
    "field.csv.gz": (compressed(gzip, b"text\n", *[b"a" * (1 << 24)] * 40), "more than"),
}  # fmt: skip


#: Those that are made in a moment; the others take seconds, in which gigabytes are compressed.
QUICK = ("delta.parquet", "numbers.parquet", "dictionary.arrow", "lists.arrow", "nulls.arrow", "values.jsonl.gz")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.thorough) for name in BOMBS]
)
def test_a_small_file_takes_little_memory(name: str, tmp_path: Path) -> None:
    write, says = BOMBS[name]
    write(tmp_path / name)
    assert (tmp_path / name).stat().st_size < 3 << 20
    done = subprocess.run(
        [sys.executable, "-c", READ, str(tmp_path / name)], capture_output=True, text=True, check=True, timeout=100
    )
    taken, said = done.stdout.splitlines()[:2]
    assert int(taken) < MOST, f"{taken} MiB: {said[:300]}"
    assert (says in said and name in said) if says else said == "read 2"


def test_rows_are_those_that_were_written(tmp_path: Path) -> None:
    """In a table whose dictionaries would be large if they were written out, too."""
    rows = [
        {"text": "a" * 400_000 if number % 3 else None, "tags": ["b" * 50_000, None, str(number)] * (number % 4)}
        for number in range(300)
    ]
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, tmp_path / "a.parquet", dictionary_pagesize_limit=1 << 30)
    pq.write_table(table, tmp_path / "b.parquet", row_group_size=7, data_page_version="2.0", compression="gzip")
    pq.write_table(table, tmp_path / "c.parquet", use_dictionary=False, column_encoding={"text": "DELTA_BYTE_ARRAY"})
    arrow(lambda: table)(tmp_path / "d.arrow")
    arrow(lambda: table, "lz4", stream=True)(tmp_path / "e.arrow")
    for name in ("a.parquet", "b.parquet", "c.parquet", "d.arrow", "e.arrow"):
        assert [record.values for record in read_records(tmp_path / name)] == rows, name


def test_a_footer_that_names_other_batches_is_not_read(tmp_path: Path) -> None:
    """The batches that were looked at are those that are read."""
    arrow(lambda: {"text": ["a", "b"]})(tmp_path / "a.arrow")
    data = (tmp_path / "a.arrow").read_bytes()
    (tmp_path / "b.arrow").write_bytes(data[: len(data) // 2])
    with pytest.raises(DataError, match=r"b\.arrow"):
        list(read_records(tmp_path / "b.arrow"))


def test_offsets_that_lead_outside_of_a_batch_are_refused(tmp_path: Path) -> None:
    with pa.ipc.new_stream(str(tmp_path / "a.arrow"), pa.schema({"text": pa.string()})) as out:
        out.write_batch(pa.record_batch({"text": ["ab", "cd"]}))
    data = (tmp_path / "a.arrow").read_bytes()
    sound = struct.pack("<3i", 0, 2, 4)
    assert data.count(sound) == 1
    (tmp_path / "a.arrow").write_bytes(data.replace(sound, struct.pack("<3i", 0, 1 << 30, 4)))
    with pytest.raises(DataError, match=r"a\.arrow"):
        list(read_records(tmp_path / "a.arrow"))
