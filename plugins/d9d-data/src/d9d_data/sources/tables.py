"""Reader of tables in binary formats, with pyarrow: Parquet, Arrow IPC, and datasets saved by ``datasets``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any

from d9d_core.errors import DataError
from d9d_core.untrusted import parse_json, read_regular

from d9d_data.sources.opening import SourceFile, check_content, open_content, stat_file
from d9d_data.sources.place import Place, Record
from d9d_data.sources.table_sizes import bounded_slices, check_arrow, parquet_sizes

#: Bytes of the largest JSON file that describes a saved dataset.
_MAX_STATE = 1 << 24


def read_table(file: SourceFile, begin: int = 0, end: int | None = None, column: str | None = None) -> Iterator[Record]:
    """Yield the rows of a source file that is a Parquet or Arrow table.

    Args:
        file: the file.
        begin: first row group of a Parquet file; else 0.
        end: first row group after the range; the end of the file if absent.
        column: only column to read; all columns if absent.

    Raises:
        DataError: the file cannot be read, is not such a table, takes too much memory, or pyarrow is not installed.
    """
    number = content_read = 0
    stored = stat_file(file.address).size
    columns = None if column is None else [column]
    with open_content(file) as content, _explained(file):
        if file.format == "parquet":
            table = _parquet(file, content)
            number = sum(table.metadata.row_group(group).num_rows for group in range(begin))
            groups = list(range(begin, table.num_row_groups if end is None else end))
            sizes = parquet_sizes(file, content, table.metadata, groups, columns)
            table = _parquet(file, content, sizes.as_dictionary)
            batches = table.iter_batches(batch_size=sizes.rows, row_groups=groups, columns=columns)
        else:
            batches = _arrow_batches(file, content, columns)
        for batch in batches:
            for rows, size in bounded_slices(file, batch, number + 1):
                content_read += size
                check_content(file.name, content_read, stored)
                for row in rows.to_pylist():
                    number += 1
                    values = {field.name: _written(row[field.name], field.type) for field in rows.schema}
                    yield Record(values, Place(file, number, " row "))


def table_columns(file: SourceFile) -> list[str]:
    """Names of the columns of a table.

    Raises:
        DataError: the file cannot be read, is not a table, or pyarrow is not installed.
    """
    with open_content(file) as content, _explained(file):
        if file.format == "parquet":
            return list(_parquet(file, content).schema_arrow.names)
        return list(_arrow_reader(file, content).schema.names)


def row_group_sizes(file: SourceFile) -> list[int]:
    """Uncompressed size in bytes of each row group of a Parquet file."""
    with open_content(file) as content, _explained(file):
        metadata = _parquet(file, content).metadata
        return [metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups)]


def saved_dataset_files(directory: str) -> list[str]:
    """Arrow files of a dataset saved by the library ``datasets`` with ``save_to_disk``, in the order of the rows.

    Args:
        directory: directory of the dataset, or of one split of a saved ``DatasetDict``.

    Raises:
        DataError: the directory is not a saved dataset.
    """
    root = Path(directory).expanduser()
    where = f"data.sources: {root} is not a dataset saved by 'datasets'"
    if (root / "dataset_dict.json").is_file():
        splits = _description(root / "dataset_dict.json").get("splits")
        shown = ", ".join(f"hf:{directory}/{split}" for split in splits) if isinstance(splits, list) else "its splits"
        raise DataError(f"data.sources: {root} holds several splits; name one: {shown}")
    if not (root / "state.json").is_file():
        raise DataError(f"{where}: it has no state.json; name a directory that save_to_disk wrote")
    state = _description(root / "state.json")
    entries = state.get("_data_files")
    if not isinstance(entries, list) or not entries:
        raise DataError(f"{where}: its state.json lists no data files; save the dataset again")
    found = []
    for entry in entries:
        name = entry.get("filename") if isinstance(entry, dict) else None
        if not isinstance(name, str) or PurePath(name).name != name or not (root / name).is_file():
            raise DataError(
                f"{where}: its state.json lists {str(name)[:80]!r}, which is not a file in the directory; copy the "
                "directory again"
            )
        found.append(str(root / name))
    return found


def _description(file: Path) -> dict[str, Any]:
    try:
        value = parse_json(read_regular(file, limit=_MAX_STATE))
    except (OSError, ValueError) as error:
        raise DataError(f"data.sources: cannot read {file}: {error}; save the dataset again") from error
    return value if isinstance(value, dict) else {}


def _pyarrow(file: SourceFile) -> Any:
    try:
        import pyarrow as pa  # type: ignore[import-untyped]
    except ImportError as error:
        raise DataError(f"data.sources: {file.name} needs pyarrow: pip install 'd9d-data[tables]'") from error
    return pa


def _parquet(file: SourceFile, content: Any, as_dictionary: Sequence[str] = ()) -> Any:
    _pyarrow(file)
    import pyarrow.parquet  # type: ignore[import-untyped]

    # Without pre-buffering, a column of a row group is read page by page.
    content.seek(0)
    return pyarrow.parquet.ParquetFile(
        content, pre_buffer=False, buffer_size=1 << 20, read_dictionary=list(as_dictionary)
    )


def _arrow_reader(file: SourceFile, content: Any, columns: Sequence[str] | None = None) -> Any:
    """Reader of an Arrow stream. An Arrow file is a stream after its first 8 bytes; the file's footer is not read."""
    ipc = _pyarrow(file).ipc
    content.seek(0)
    begin = 8 if content.read(6) == b"ARROW1" else 0
    content.seek(begin)
    if columns is None:
        return ipc.open_stream(content)
    included = [ipc.open_stream(content).schema.get_field_index(column) for column in columns]
    content.seek(begin)
    return ipc.open_stream(content, options=ipc.IpcReadOptions(included_fields=included))


def _arrow_batches(file: SourceFile, content: Any, columns: Sequence[str] | None) -> Iterator[Any]:
    content.seek(8 if content.read(6) == b"ARROW1" else 0)
    check_arrow(file, content)
    for batch in _arrow_reader(file, content, columns):
        # pyarrow trusts the offsets in a file, which may point outside the memory of a batch.
        batch.validate(full=True)
        yield batch if columns is None else batch.select(columns)


def _written(value: Any, kind: Any) -> Any:
    """Value of a column as it was written, without the nulls that the type of the column adds.

    All structs of a column have the same fields, so a struct that was written without a field has a null in this field.
    Maps, lists and the column itself add no nulls.

    Args:
        value: value as ``to_pylist()`` returns it.
        kind: Arrow type of the column, or of a part of it.
    """
    if hasattr(kind, "index_type") or hasattr(kind, "run_end_type"):  # dictionary or run-end encoding of another type
        kind = kind.value_type
    if value is None or not kind.num_fields:
        return value
    if hasattr(kind, "item_type"):  # a map, converted to a list of pairs
        return {key: _written(item, kind.item_type) for key, item in value}
    if isinstance(value, dict):
        types = {field.name: field.type for field in (kind.field(index) for index in range(kind.num_fields))}
        return {name: _written(item, types[name]) for name, item in value.items() if item is not None}
    return [_written(item, kind.value_type) for item in value] if isinstance(value, list) else value


@contextmanager
def _explained(file: SourceFile) -> Iterator[None]:
    arrow = _pyarrow(file)
    try:
        yield
    # Causes: text that is not UTF-8, times out of range, a time zone unknown to this system.
    except (arrow.ArrowException, ValueError, OverflowError, LookupError) as error:
        reason = str(error).partition("\n")[0][:300]
        raise DataError(
            f"data.sources: {file.name} is not a readable {file.format} file ({reason}); "
            "write it again, or remove it from the sources"
        ) from error
