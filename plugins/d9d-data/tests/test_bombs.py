"""Small files that stand for gigabytes: read in bounded memory, or refused with the size that they promise."""

from __future__ import annotations

import gzip
import lzma
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from d9d_core.errors import DataError
from d9d_data.sources.opening import SourceFile
from d9d_data.sources.records import read_records
from d9d_data.sources.table_sizes import parquet_sizes

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
bombs = pytest.importorskip("d9d_testing.hostile.bombs")

#: MiB that reading any of these files may take, in addition to Python and pyarrow.
MOST = 700
READ = """
import resource, sys, threading
import pyarrow, pyarrow.compute, pyarrow.parquet
from d9d_core.errors import DataError
from d9d_data.sources.document import Piece, texts_of
from d9d_data.sources.opening import SourceFile
from d9d_data.sources.opening import SourceFile
from d9d_data.sources.records import read_records
from d9d_data.sources.table_sizes import parquet_sizes
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


#: Those that are made in a moment; the others take seconds, in which gigabytes are compressed.
QUICK = ("delta.parquet", "numbers.parquet", "dictionary.arrow", "lists.arrow", "nulls.arrow", "values.jsonl.gz")


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.full) for name in bombs.BOMBS]
)
def test_a_small_file_takes_little_memory(name: str, tmp_path: Path) -> None:
    write, says = bombs.BOMBS[name]
    write(tmp_path / name)
    assert (tmp_path / name).stat().st_size < 3 << 20
    done = subprocess.run(
        [sys.executable, "-c", READ, str(tmp_path / name)], capture_output=True, text=True, check=True, timeout=100
    )
    taken, said = done.stdout.splitlines()[:2]
    assert int(taken) < MOST, f"{taken} MiB: {said[:300]}"
    assert (says in said and name in said) if says else said == "read 2"


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["dictionary.arrow", "delta.parquet", "lines.jsonl.gz", "lines.jsonl.xz"])
def test_a_small_file_does_not_stand_for_a_corpus(name: str, tmp_path: Path) -> None:
    """However small its rows are: prepared data would fill the disk."""
    if name in bombs.BOMBS:
        bombs.BOMBS[name][0](tmp_path / name)
    else:
        module = {"gz": gzip, "xz": lzma}[name.rpartition(".")[2]]
        line = b'{"text": "%s"}\n' % (b"a" * 500)
        bombs.compressed(module, *[line * 5_000] * 70)(tmp_path / name)
    records, read = read_records(tmp_path / name), 0
    with pytest.raises(DataError, match=rf"{name} has [\d,]+ bytes but decompresses to more than 134,217,728; "):  # noqa: PT012
        while True:
            read += len(next(records).values["text"])
    assert read < 1 << 28


@pytest.mark.thorough
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
    bombs.arrow(lambda: table)(tmp_path / "d.arrow")
    bombs.arrow(lambda: table, "lz4", stream=True)(tmp_path / "e.arrow")
    for name in ("a.parquet", "b.parquet", "c.parquet", "d.arrow", "e.arrow"):
        assert [record.values for record in read_records(tmp_path / name)] == rows, name


def test_a_footer_that_names_other_batches_is_not_read(tmp_path: Path) -> None:
    """The batches that were looked at are those that are read."""
    bombs.arrow(lambda: {"text": ["a", "b"]})(tmp_path / "a.arrow")
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


@pytest.mark.parametrize(("length", "rows"), [(1, 256), (1 << 18, 256), ((1 << 18) + 1, 255), (1 << 20, 64)])
def test_a_batch_holds_64_mib_of_texts_of_fixed_length(tmp_path: Path, length: int, rows: int) -> None:
    path = tmp_path / "fixed.parquet"
    texts = pa.array([b"x" * length], pa.binary(length))
    pq.write_table(pa.table({"a": texts, "b": [1]}), path, use_dictionary=False)
    with path.open("rb") as content:
        metadata = pq.ParquetFile(path).metadata
        found = parquet_sizes(SourceFile.of(str(path)), content, metadata, [0], ["a"])
        assert (found.rows, found.as_dictionary) == (rows, [])
        assert parquet_sizes(SourceFile.of(str(path)), content, metadata, [0], ["b"]).rows == 256
        assert parquet_sizes(SourceFile.of(str(path)), content, metadata, [0], None).rows <= rows
        assert parquet_sizes(SourceFile.of(str(path)), content, metadata, [], None).rows == 256
