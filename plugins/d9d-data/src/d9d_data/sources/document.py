"""Documents of source files: the texts in files or in their records."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from d9d_core.errors import DataError

from d9d_data.sources import python
from d9d_data.sources.kinds import kind_of
from d9d_data.sources.opening import SourceFile, open_content, stat_file
from d9d_data.sources.place import Place, Record, Reject, refuse
from d9d_data.sources.records import columns_of, read_records, value_of
from d9d_data.sources.table_sizes import BUDGET, RATIO

#: Formats of files whose records have fields; in the other formats, texts are not in fields.
STRUCTURED = frozenset({"jsonl", "json", "csv", "tsv", "parquet", "arrow", "kinds"})
#: Bytes of the largest text in a compressed file. Uncompressed files have no limit, because their size is visible.
MAX_COMPRESSED_TEXT = 1 << 30
#: Formats in which all records have the same fields, known from a schema or a header.
_WITH_SCHEMA = frozenset({"csv", "tsv", "parquet", "arrow"})
#: Usual names of the field with the text of a document.
_LIKELY = ("text", "content", "body", "document", "article", "raw_content", "story", "code", "completion", "response")


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a source file that one process reads.

    Attributes:
        file: the file.
        field: name of the field with the text, in a structured file.
        begin: first byte (JSON lines) or row group (Parquet) of the piece; else 0.
        end: first byte or row group after the piece; the end of the file if absent.
    """

    file: SourceFile
    field: str | None = None
    begin: int = 0
    end: int | None = None


def texts_of(piece: Piece, reject: Reject = refuse) -> Iterator[str]:
    """Yield the texts of the documents in a piece of a source file, in order; texts may be empty.

    Args:
        piece: piece to read.
        reject: called for each malformed record.

    Raises:
        DataError: the file cannot be read, or lacks the field.
    """
    file = piece.file
    if file.format == "topics":
        yield from python.topics()
    elif piece.field is not None:
        yield from _texts_in_records(piece, piece.field, reject)
    else:
        try:
            text = _whole_text(file)
        except UnicodeDecodeError as error:
            reject(
                Place(file),
                f"is not UTF-8 text (byte {error.start}: {error.reason}); "
                "convert it, or name only text files, for example with a glob such as 'corpus/**/*.txt'",
            )
        else:
            yield text


def _whole_text(file: SourceFile) -> str:
    with open_content(file) as content:
        if not file.compression:
            data = content.read()
        elif len(data := content.read((most := _most_text(file)) + 1)) > most:
            raise DataError(
                f"data.sources: {file.name} has a text of more than {most:,} bytes, too long, as each document is "
                "tokenised in "
                "memory; split it into several files, or into records"
            )
    if file.format == "docstrings":
        return python.docstrings_in(data, file.name)
    return data.decode("utf-8-sig")


def _most_text(file: SourceFile) -> int:
    """Size limit in bytes of a text in a compressed file, so that a small file cannot fill the memory."""
    return min(MAX_COMPRESSED_TEXT, max(BUDGET, RATIO * stat_file(file.address).size))


def _texts_in_records(piece: Piece, field: str, reject: Reject) -> Iterator[str]:
    file = piece.file
    columns = columns_of(file) if file.format in _WITH_SCHEMA else []
    if columns and field not in columns and field.partition(".")[0] not in columns:
        # A column that is missing from all records is an error even with ``malformed: skip``.
        raise DataError(f"data.field: {file.name} has no column {field!r} ({_choice(file, columns)})")
    for record in read_records(file, piece.begin, piece.end, field, reject):
        text = value_of(record, field)
        if not isinstance(text, str):
            reject(record.place, _no_text(record, field, text))
        elif not text.isascii() and _has_surrogates(text):
            reject(record.place, f"holds half of a surrogate pair in its field {field!r}; repair it")
        else:
            yield text


def _has_surrogates(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _no_text(record: Record, field: str, value: Any) -> str:
    has = ", ".join(str(name)[:40] for name in islice(record.values, 20)) or "none"
    found = ""
    if field in record.values:
        found = "it is empty there: " if value is None else f"it is {kind_of(value)} there: "
    return (
        f"has no text in a field {field!r} (it has {has}); {found}"
        'write records such as {"text": "..."}, name another field with data.field, or leave such records out with '
        "'data.malformed: skip'"
    )


def check_structured(file: SourceFile, what: str) -> None:
    """Raise if a file has no records with fields.

    Args:
        file: the file.
        what: name of the records, for the error message.

    Raises:
        DataError: the file has no records with fields.
    """
    if file.format not in STRUCTURED:
        formats = ", ".join(f".{name}" for name in sorted(STRUCTURED - {"kinds"}))
        raise DataError(
            f"data.sources: {file.name} has no records with fields, but {what} are records; name files of the formats "
            f"{formats}, or use the dataset text"
        )


def check_field(file: SourceFile, field: str | None) -> None:
    """Raise if a structured file is read without the name of a field, because its syntax is not text to train on.

    Raises:
        DataError: the field is missing; the message lists the file's fields, and the most likely one.
    """
    if field is None and file.format in STRUCTURED:
        raise DataError(
            f"data.field: {file.name} is a structured file; name the field that holds the text "
            f"({_choice(file, columns_of(file))})"
        )


def _choice(file: SourceFile, columns: list[str]) -> str:
    shown = ", ".join(column[:40] for column in columns[:20]) + (", ..." if len(columns) > 20 else "")
    likely = likely_field(file, columns)
    return f"it has {shown or 'none'}" + (f"; '{likely}' looks right: 'data.field: {likely}'" if likely else "")


def likely_field(file: SourceFile, columns: list[str]) -> str | None:
    """Most likely text field of a structured file: by its name, or else the longest text of the first record.

    Args:
        file: the file.
        columns: names of the file's fields.
    """
    if by_name := next((name for name in _LIKELY if name in columns), None):
        return by_name
    record = next(read_records(file, reject=lambda _place, _problem: None), None)
    values: Mapping[str, Any] = record.values if record else {}
    texts = {name: value for name, value in values.items() if isinstance(value, str)}
    return max(texts, key=lambda name: len(texts[name])) if texts else None


def topics_digest() -> str:
    """Digest of the texts of ``python:topics``, which are not stored in a file."""
    digest = hashlib.sha256()
    for text in python.topics():
        digest.update(f"{len(text)} {text}".encode())
    return digest.hexdigest()
