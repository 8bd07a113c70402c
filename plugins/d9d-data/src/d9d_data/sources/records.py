"""Records of structured files of any format: values by field name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from d9d_core.errors import DataError
from d9d_core.untrusted import parse_json

from d9d_data.sources.kinds import kind_of
from d9d_data.sources.lines import csv_columns, read_csv, read_json_lines
from d9d_data.sources.opening import SourceFile, open_content
from d9d_data.sources.place import Place, Record, Reject, refuse
from d9d_data.sources.python import kinds_in
from d9d_data.sources.tables import read_table, table_columns

#: Bytes of the largest ``.json`` file, which is parsed as a whole.
MAX_JSON_FILE = 1 << 28


def read_records(
    file: SourceFile | str | Path,
    begin: int = 0,
    end: int | None = None,
    field: str | None = None,
    reject: Reject = refuse,
) -> Iterator[Record]:
    """Yield the records of a structured source file (lines or tables), read on demand.

    Args:
        file: the file, or its path or fsspec address.
        begin: start of a range: a byte of an uncompressed JSON lines file, or a row group of a Parquet file; else 0.
        end: first byte or row group after the range; the end of the file if absent.
        field: the only field that the caller needs, as for :func:`value_of`; the records may then lack other fields.
        reject: called for each malformed record.

    Raises:
        DataError: the file cannot be read, or is not structured.
    """
    file = file if isinstance(file, SourceFile) else SourceFile.of(file)
    match file.format:
        case "jsonl":
            return read_json_lines(file, begin, end, reject)
        case "json":
            return _read_json(file, reject)
        case "csv" | "tsv":
            return read_csv(file, reject)
        case "kinds":
            return _read_kinds(file)
        case "parquet" | "arrow":
            return read_table(file, begin, end, _column_of(file, field))
    raise DataError(f"data.sources: {file.name} is plain text without fields; use a .jsonl, .csv or .parquet file")


def columns_of(file: SourceFile | str | Path) -> list[str]:
    """Field names of a structured file, from its schema or its first record; empty if it has no record.

    Raises:
        DataError: the file cannot be read, or is not structured.
    """
    file = file if isinstance(file, SourceFile) else SourceFile.of(file)
    match file.format:
        case "csv" | "tsv":
            return csv_columns(file)
        case "parquet" | "arrow":
            return table_columns(file)
    return [name for record in islice(read_records(file), 1) for name in record.values]


def value_of(record: Record, field: str) -> Any:
    """Value of a record's field; see :func:`value_in`."""
    return value_in(record.values, field)


def value_in(values: Mapping[str, Any], field: str) -> Any:
    """Value of a field; ``None`` if the field is missing.

    Args:
        values: values of a record by field.
        field: name of the field. ``meta.text`` is the field of this name, or else ``text`` in the field ``meta``.
    """
    value: Any = values
    if field in value:
        return value[field]
    for name in field.split("."):
        if not isinstance(value, dict):
            return None
        value = value.get(name)
    return value


def field_of(record: Record, fields: Sequence[str]) -> str:
    """First name in ``fields`` that has a value in the record; if no name has a value, the first name."""
    return next((field for field in fields if value_of(record, field) is not None), fields[0])


def _column_of(file: SourceFile, field: str | None) -> str | None:
    """Column of a table that contains the field; ``None``, which reads all columns, if no column does."""
    columns = table_columns(file)
    if field is None or field in columns:
        return field
    top = field.partition(".")[0]
    return top if top in columns else None


def _read_kinds(file: SourceFile) -> Iterator[Record]:
    with open_content(file) as content:
        found = kinds_in(content.read(), file.name)
    for kind, line, text in found:
        yield Record({"text": text, "label": kind}, Place(file, line))


def _read_json(file: SourceFile, reject: Reject) -> Iterator[Record]:
    with open_content(file) as content:
        data = content.read(MAX_JSON_FILE + 1)
    if len(data) > MAX_JSON_FILE:
        raise DataError(
            f"data.sources: {file.name} has more than {MAX_JSON_FILE:,} bytes of JSON in one piece; "
            "write it as .jsonl, with one object per line"
        )
    try:
        value = parse_json(data, limit=MAX_JSON_FILE)
    except ValueError as error:
        raise DataError(f"data.sources: {file.name} is not JSON ({error}); repair it") from error
    del data
    if isinstance(value, dict):
        lists = [name for name, inner in value.items() if isinstance(inner, list)]
        chosen = "data" if "data" in lists else lists[0] if len(lists) == 1 else None
        if chosen is None:
            raise DataError(
                f"data.sources: {file.name} is one object with the fields {', '.join(value) or '(none)'}, but not a "
                "list of records or an object with a list in its field 'data'; write one of these, or a .jsonl file"
            )
        value = value[chosen]
    if not isinstance(value, list):
        raise DataError(
            f"data.sources: {file.name} contains {kind_of(value)}, not a list of records; write a list of objects"
        )
    for number, entry in enumerate(value, 1):
        place = Place(file, number, " record ")
        if isinstance(entry, dict):
            yield Record(entry, place)
        else:
            reject(place, f"has no fields (it is {kind_of(entry)}); write objects")
