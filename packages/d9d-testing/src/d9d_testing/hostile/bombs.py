"""Small corpus files that expand to gigabytes, and the expected error of each. Needs pyarrow."""

from __future__ import annotations

import bz2
import gzip
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

LONG = "a" * 20_000_000


def parquet(table: Callable[[], Any], **options: Any) -> Callable[[Path], None]:
    """Return a function that writes the columns returned by ``table()`` to a Parquet file."""
    return lambda path: pq.write_table(pa.table(table()), path, compression="zstd", **options)


def arrow(table: Callable[[], Any], compression: str = "zstd", stream: bool = False) -> Callable[[Path], None]:
    """Return a function that writes the columns returned by ``table()`` to an Arrow file or stream."""

    def write(path: Path) -> None:
        made = pa.table(table())
        new = pa.ipc.new_stream if stream else pa.ipc.new_file
        with new(str(path), made.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as out:
            out.write_table(made)

    return write


def repeated(rows: int, text: str) -> Any:
    """Dictionary-encoded column that repeats one text and stores it once."""
    return pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array([text]))


def many(values: Any, count: int) -> Any:
    """Arrow column of lists with ``count`` values each."""
    return pa.FixedSizeListArray.from_arrays(values, count)


def compressed(module: Any, *parts: bytes) -> Callable[[Path], None]:
    """Return a function that writes a file compressed by a module such as ``gzip``."""

    def write(path: Path) -> None:
        with module.open(path, "wb") as out:
            for part in parts:
                out.write(part)

    return write


#: File name -> function that writes it, and text of the expected error; empty if the file is readable.
BOMBS: dict[str, tuple[Callable[[Path], None], str]] = {
    "dictionary.parquet": (parquet(lambda: {"text": [LONG] * 50}, dictionary_pagesize_limit=1 << 30), ""),
    "page.parquet": (parquet(lambda: {"text": ["a" * 900_000_000]}, use_dictionary=False), "takes 900,000,0"),
    "delta.parquet": (
        parquet(
            lambda: {"text": ["a" * 3_000_000] * 300}, use_dictionary=False, data_page_size=1 << 30,
            column_encoding={"text": "DELTA_BYTE_ARRAY"},
        ),
        "",
    ),
    "lists.parquet": (
        parquet(lambda: {"messages": [["a" * 100_000] * 20_000]}, dictionary_pagesize_limit=1 << 30),
        "row 1 takes 2,000,320,0",
    ),
    "structs.parquet": (
        parquet(
            lambda: {"messages": [[{"role": "user", "content": "a" * 100_000}] * 20_000]},
            dictionary_pagesize_limit=1 << 30,
        ),
        "row 1 takes 2,00",
    ),
    "numbers.parquet": (
        parquet(lambda: {"n": many(pa.array([0] * 60_000_000, pa.int8()), 60_000_000)}), "takes 960,000,000",
    ),
    "dictionary.arrow": (arrow(lambda: {"text": repeated(256, LONG)}), ""),
    "dictionary.feather": (arrow(lambda: {"text": repeated(256, LONG)}, "lz4"), ""),
    "dictionary-stream.arrow": (arrow(lambda: {"text": repeated(256, LONG)}, stream=True), ""),
    "buffer.arrow": (arrow(lambda: {"text": ["a" * 900_000_000]}), "takes 900,000,008"),
    "dictionary-buffer.arrow": (arrow(lambda: {"text": repeated(2, "a" * 900_000_000)}), "takes 900,000,008"),
    "nulls.arrow": (arrow(lambda: {"x": many(pa.nulls(1_000_000_000), 1_000_000_000)}), "row 1 takes 16,000,000,0"),
    "lists.arrow": (
        arrow(lambda: {"x": pa.ListArray.from_arrays(pa.array([0, 100], pa.int32()), repeated(100, LONG))}),
        "row 1 takes 2,000,0",
    ),
    "runs.arrow": (
        arrow(lambda: {"x": many(pa.RunEndEncodedArray.from_arrays(pa.array([100], pa.int32()), [LONG]), 100)}),
        "row 1 takes 2,000,0",
    ),
    "line.jsonl.gz": (compressed(gzip, *[b"0" * (1 << 24)] * 80), "more than"),
    "line.jsonl.bz2": (compressed(bz2, *[b"0" * (1 << 24)] * 8), "more than"),
    "line.jsonl.xz": (compressed(lzma, *[b"0" * (1 << 24)] * 8), "more than"),
    "values.jsonl.gz": (compressed(gzip, b'{"a": [', *[b"[]," * (1 << 20)] * 20, b"[]]}\n"), "8,388,608 values"),
    "values.json.gz": (compressed(gzip, b"[", *[b"[]," * (1 << 20)] * 60, b"[]]"), "decompresses to more than"),
    "text.txt.gz": (compressed(gzip, *[b"a" * (1 << 24)] * 40), "decompresses to more than"),
    "field.csv.gz": (compressed(gzip, b"text\n", *[b"a" * (1 << 24)] * 40), "more than"),
}  # fmt: skip
