"""Documents of structured files, written with the libraries that people write them with."""

from __future__ import annotations

import bz2
import csv
import gzip
import itertools
import json
import lzma
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
from d9d_core.errors import DataError
from d9d_data.sources.find import find_files
from d9d_data.sources.lines import read_json_lines
from d9d_data.sources.opening import SourceFile
from d9d_data.sources.records import columns_of, read_records
from pydantic import ValidationError

ZSTD = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
pa, parquet, feather, zstd = map(pytest.importorskip, ["pyarrow", "pyarrow.parquet", "pyarrow.feather", ZSTD])

TEXTS = ["one — é", 'two, "quoted"\nand a line', "three\tand a tab", "four " * 300]
ROWS = [{"id": number, "text": text, "meta": {"text": f"inner {number}"}} for number, text in enumerate(TEXTS)]


def json_lines(path: Path) -> None:
    path.write_text("\n".join(json.dumps(row) for row in ROWS), encoding="utf-8")


def table_in_text(path: Path) -> None:
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",")
        writer.writerow(["id", "text", "meta"])
        writer.writerows([row["id"], row["text"], "x"] for row in ROWS)


def arrow_stream(path: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)


def arrow_file(path: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)


FORMATS: dict[str, Callable[[Path], Any]] = {
    "a.jsonl": json_lines,
    "a.ndjson": json_lines,
    "a.json": lambda path: path.write_text(json.dumps(ROWS)),
    "data.json": lambda path: path.write_text(json.dumps({"version": 1, "data": ROWS, "other": []})),
    "list.json": lambda path: path.write_text(json.dumps({"version": 1, "rows": ROWS})),
    "a.csv": table_in_text,
    "a.tsv": table_in_text,
    "a.parquet": lambda path: parquet.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=3),
    "a.feather": lambda path: feather.write_feather(pa.Table.from_pylist(ROWS), path),
    "a.arrow": arrow_file,
    "stream.arrow": arrow_stream,
}
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstd.compress,
}


def texts(stream: Any) -> list[str]:
    tokens, starts = stream._corpus.tokens.tolist(), stream._corpus.starts.tolist()
    return [bytes(tokens[a : b - 1]).decode() for a, b in itertools.pairwise(starts)]


@pytest.fixture(params=FORMATS)
def written(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / request.param
    FORMATS[request.param](path)
    return path


def test_each_format_gives_the_texts_in_its_field(written: Path, open_stream: Any) -> None:
    assert texts(open_stream(written, field="text")) == TEXTS


def test_each_format_names_its_fields_and_its_records(written: Path) -> None:
    assert columns_of(written) == ["id", "text", "meta"]
    records = list(read_records(str(written)))
    assert [record.values["text"] for record in records] == TEXTS
    place = {".jsonl": ":4", ".ndjson": ":4", ".json": " record 4", ".csv": ":6", ".tsv": ":6"}
    assert str(records[3].place) == f"{written}{place.get(written.suffix, ' row 4')}"


def test_each_format_refuses_to_be_read_as_plain_text(written: Path, open_stream: Any) -> None:
    with pytest.raises(DataError, match=rf"^data\.field: .*{written.name} is a structured file; .*"
                       r"the text \(it has id, text, meta; 'text' looks right: 'data.field: text'\)"):  # fmt: skip
        open_stream(written)


@pytest.mark.parametrize("name", [name for name in FORMATS if not name.endswith(("csv", "tsv"))])
def test_fields_in_fields_are_named_with_dots(name: str, tmp_path: Path, open_stream: Any) -> None:
    FORMATS[name](tmp_path / name)
    stream = open_stream(tmp_path / name, field="meta.text", sequence_length=4)
    assert texts(stream) == [f"inner {number}" for number in range(4)]


def test_a_name_with_a_dot_is_that_of_a_field_if_there_is_one(tmp_path: Path, open_stream: Any) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"meta.text": "outer", "meta": {"text": "inner"}}))
    assert texts(open_stream(tmp_path / "a.jsonl", field="meta.text", sequence_length=4)) == ["outer"]


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.txt"])
def test_compressed_files_hold_what_they_held_before(name: str, suffix: str, tmp_path: Path, open_stream: Any) -> None:
    plain = tmp_path / name
    if name == "a.txt":
        plain.write_text(TEXTS[0])
    else:
        FORMATS[name](plain)
    data = plain.read_bytes()
    (tmp_path / f"{name}{suffix}").write_bytes(COMPRESS[suffix](data[:40]) + COMPRESS[suffix](data[40:]))
    expected = texts(open_stream(plain, field="text", sequence_length=4))
    assert texts(open_stream(tmp_path / f"{name}{suffix}", field="text", sequence_length=4)) == expected


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("damage", ["cut", "other"])
def test_a_compressed_file_that_is_cut_off_or_none_is_an_error(
    suffix: str, damage: str, tmp_path: Path, open_stream: Any
) -> None:
    data = COMPRESS[suffix](b"".join(b'{"text": "%x"}\n' % (number**9) for number in range(9000)))
    file = tmp_path / f"a.jsonl{suffix}"
    file.write_bytes(data[: len(data) // 2] if damage == "cut" else b"no such file" * 99)
    for malformed in ("error", "skip"):
        with pytest.raises(DataError, match=r"a\.jsonl\.\w+ is damaged or cut off|cannot read .*a\.jsonl"):
            open_stream(file, field="text", malformed=malformed)


def test_folders_and_globs_mix_text_and_structured_files(tmp_path: Path, open_stream: Any) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name in ("a.jsonl", "b.parquet", "c.csv"):
        FORMATS[f"a{Path(name).suffix}"](folder / name)
    (folder / "d.txt").write_text("the last")
    for source in (folder, folder / "*"):
        assert texts(open_stream(source, field="text")) == [*TEXTS * 3, "the last"]


def test_addresses_are_read_through_fsspec(open_stream: Any) -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe("/corpus/a.jsonl", b'{"text": "from memory"}\n{"text": "and more of it"}')
    memory.pipe("/corpus/b.txt.gz", gzip.compress(b"a text"))
    memory.pipe("/corpus/.hidden", b"no")
    try:
        for source in ("memory://corpus", "memory://corpus/*.*"):
            assert texts(open_stream(source, field="text")) == ["from memory", "and more of it", "a text"]
        assert texts(open_stream("memory://corpus/b.txt.gz", sequence_length=4)) == ["a text"]
        with pytest.raises(DataError, match=r"data\.sources\[0\]: .*memory://nothing"):
            open_stream("memory://nothing")
        with pytest.raises(
            ValidationError, match=r"sources\.0\s+Value error, fsspec has no driver for addresses of 'nowhere://'"
        ):
            open_stream("nowhere://x")
    finally:
        memory.rm("/corpus", recursive=True)


# --- saved by the library datasets


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    datasets = pytest.importorskip("datasets")
    root = tmp_path_factory.mktemp("saved")
    rows = datasets.Dataset.from_list([{"text": f"document {number}", "id": number} for number in range(40)])
    rows.save_to_disk(root / "one", num_shards=3)
    rows.select([7, 3, 9]).save_to_disk(root / "selected")
    datasets.DatasetDict({"train": rows, "test": rows.select([1, 2])}).save_to_disk(root / "splits")
    return root


@pytest.mark.thorough
def test_saved_datasets_are_read_in_the_order_of_their_rows(saved: Path, open_stream: Any) -> None:
    source = f"hf:{saved / 'one'}"
    assert len(find_files([source])) == 3
    assert texts(open_stream(source, field="text")) == [f"document {number}" for number in range(40)]
    assert texts(open_stream(f"hf:{saved / 'selected'}", field="text")) == ["document 7", "document 3", "document 9"]
    test = texts(open_stream(f"hf:{saved / 'splits' / 'test'}", field="text", sequence_length=4))
    assert test == ["document 1", "document 2"]


def test_saved_datasets_need_a_field_and_a_split(saved: Path, tmp_path: Path, open_stream: Any) -> None:
    with pytest.raises(DataError, match=r"it has text, id; 'text' looks right"):
        open_stream(f"hf:{saved / 'one'}")
    with pytest.raises(
        DataError, match=rf"holds several splits; name one: hf:{saved}/splits/train, hf:{saved}/splits/"
    ):
        open_stream(f"hf:{saved / 'splits'}", field="text")
    with pytest.raises(DataError, match=r"is not a dataset saved by 'datasets': it has no state\.json"):
        open_stream(f"hf:{tmp_path}", field="text")
    for folder in ("one", "splits"):
        with pytest.raises(
            DataError, match=rf"seems to be saved by the library 'datasets'; write 'hf:{saved / folder}'"
        ):
            open_stream(saved / folder, field="text")


@pytest.mark.parametrize(
    "state",
    ["[]", "{}", "{", '{"_data_files": [{"filename": "../secret"}]}', '{"_data_files": [3]}', '{"_data_files": [{}]}'],
)
def test_a_saved_dataset_that_names_other_files_is_refused(tmp_path: Path, state: str, open_stream: Any) -> None:
    (tmp_path / "secret").write_text("x")
    folder = tmp_path / "saved"
    folder.mkdir()
    (folder / "state.json").write_text(state)
    with pytest.raises(DataError, match=r"is not a dataset saved by 'datasets'|cannot read .*state\.json"):
        open_stream(f"hf:{folder}", field="text")


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_ranges_of_a_file_have_each_line_once_and_know_their_places(tmp_path: Path, cut: int) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'\n{"a": 1}\n\n{"a": 22}\r\n{"a": 333}\n{"a": "   "}\n\n\n{"a": 5}')
    source = SourceFile.of(file)
    whole = [(dict(record.values), str(record.place)) for record in read_json_lines(source)]
    size = file.stat().st_size
    parts = [
        (dict(record.values), record.place.exact())
        for begin in range(0, size, cut)
        for record in read_json_lines(source, begin, begin + cut)
    ]
    assert parts == whole
    assert [place.rpartition(":")[2] for _, place in whole] == ["2", "4", "5", "6", "9"]


def test_a_column_of_a_table_may_be_longer_than_python_allows_by_default(tmp_path: Path) -> None:
    limit = csv.field_size_limit(2**17)
    try:
        (tmp_path / "a.csv").write_text("text\n" + "x" * 300_000 + "\n")
        (record,) = read_records(tmp_path / "a.csv")
    finally:
        csv.field_size_limit(limit)
    assert len(record.values["text"]) == 300_000


@pytest.mark.full
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.csv", "a.parquet"])
def test_reading_takes_little_memory_however_large_the_file(name: str, tmp_path: Path) -> None:
    """pyarrow's own memory is counted by pyarrow."""
    rows = [{"text": f"{number} " * 2000} for number in range(3000)]  # 30 million characters
    path = tmp_path / name
    if name == "a.parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=500)
    else:
        lines = ["text", *(row["text"] for row in rows)] if name == "a.csv" else map(json.dumps, rows)
        data = "\n".join(lines).encode()
        path.write_bytes(COMPRESS[path.suffix](data) if path.suffix in COMPRESS else data)
    del rows
    pool = pa.default_memory_pool()
    before, most = pool.bytes_allocated(), 0
    tracemalloc.start()
    try:
        for _ in read_records(path):
            most = max(most, pool.bytes_allocated() - before)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak + most < 16e6


#: Values with fields that others of the column lack, empty objects, nulls in lists, and objects in objects.
NESTED: list[dict[str, Any]] = [
    {"calls": [{"name": "weather", "arguments": {"city": "Paris"}}, {"name": "add", "arguments": {"a": 1, "b": 0}}]},
    {"calls": [{"name": "add", "arguments": {"a": 2}}, {"name": "now"}]},
    {"calls": [{"name": "deep", "arguments": {"in": {"x": [1, None, 3]}}}, {"name": "deep", "arguments": {"in": {}}}]},
    {"calls": []},
]
COLUMNAR = [name for name in FORMATS if name.endswith(("parquet", "feather", "arrow"))]


@pytest.mark.parametrize("name", COLUMNAR)
def test_columns_of_objects_give_the_fields_that_were_written(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A column has all fields of all its objects, and a null where an object has none."""
    monkeypatch.setitem(globals(), "ROWS", NESTED)
    FORMATS[name](tmp_path / name)
    assert [record.values for record in read_records(tmp_path / name)] == NESTED


@pytest.mark.parametrize("name", COLUMNAR)
def test_maps_are_objects_whose_nulls_were_written(name: str, tmp_path: Path) -> None:
    """A map has its own keys, so its nulls are values; objects in it are as anywhere."""
    inner = pa.struct([("x", pa.int64()), ("y", pa.int64())])
    kinds = {"plain": pa.map_(pa.string(), pa.string()), "objects": pa.list_(pa.map_(pa.string(), inner))}
    rows = [
        {"plain": [("a", "1"), ("b", None)], "objects": [[("k", {"x": 1, "y": None})], []]},
        {"plain": [], "objects": []},
    ]
    table = pa.table({name: pa.array([row[name] for row in rows], kind) for name, kind in kinds.items()})
    if name.endswith("parquet"):
        parquet.write_table(table, tmp_path / name)
    else:
        feather.write_feather(table, tmp_path / name)
    assert [record.values for record in read_records(tmp_path / name)] == [
        {"plain": {"a": "1", "b": None}, "objects": [{"k": {"x": 1}}, {}]},
        {"plain": {}, "objects": []},
    ]


def test_nulls_that_somebody_wrote_in_json_stay(tmp_path: Path) -> None:
    rows = [{"calls": [{"arguments": {"city": None}}]}]
    (tmp_path / "a.jsonl").write_text(json.dumps(rows[0]))
    (tmp_path / "a.json").write_text(json.dumps(rows))
    for name in ("a.jsonl", "a.json"):
        assert [record.values for record in read_records(tmp_path / name)] == rows
