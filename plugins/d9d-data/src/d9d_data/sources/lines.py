"""Reader of files with one record per line; its memory does not grow with the file."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Protocol

from d9d_core.errors import DataError
from d9d_core.untrusted import parse_json

from d9d_data.sources.kinds import kind_of
from d9d_data.sources.opening import SourceFile, open_content
from d9d_data.sources.place import Place, Record, Reject, refuse

#: Largest number of bytes of a line, and of characters of a field of a CSV file.
MAX_LINE = 1 << 26
_BLOCK = 1 << 20  # bytes


@dataclass(frozen=True, slots=True)
class Line:
    """Line of a file: its number, from 1 in the range that is read, and its bytes with the line end."""

    number: int
    content: bytes


def read_lines(file: SourceFile, begin: int = 0, end: int | None = None, reject: Reject = refuse) -> Iterator[Line]:
    """Yield the lines of a source file that start within a range of bytes, so that each line belongs to one range.

    Args:
        file: file to read; a range needs an uncompressed file.
        begin: first byte of the range.
        end: first byte after the range; the end of the file if absent.
        reject: called for each line that is too long.
    """
    with open_content(file) as content:
        position = begin
        if begin:  # a line that started earlier belongs to the range before
            content.seek(begin - 1)
            position = begin - 1 + _skip_line(content)
        number = 0
        while end is None or position < end:
            line = content.readline(MAX_LINE + 1)
            if not line:
                return
            number += 1
            position += len(line)
            if len(line) > MAX_LINE:
                reject(
                    Place(file, number, begin=begin),
                    f"has more than {MAX_LINE:,} bytes; split it into several, or use another format",
                )
                if not line.endswith(b"\n"):
                    position += _skip_line(content)
            else:
                yield Line(number, line)


def _skip_line(content: BinaryIO) -> int:
    """Read up to the end of a line, and return the number of bytes read."""
    skipped = 0
    while part := content.readline(_BLOCK):
        skipped += len(part)
        if part.endswith(b"\n"):
            break
    return skipped


def read_json_lines(
    file: SourceFile, begin: int = 0, end: int | None = None, reject: Reject = refuse
) -> Iterator[Record]:
    """Yield the objects of a file with one JSON object per line; arguments as for :func:`read_lines`."""
    for line in read_lines(file, begin, end, reject):
        if not line.content.strip():
            continue
        place = Place(file, line.number, begin=begin)
        try:
            value = parse_json(line.content, limit=MAX_LINE)
        except ValueError as error:
            reject(place, f"is not JSON ({error}); write one object per line")
            continue
        if isinstance(value, dict):
            yield Record(value, place)
        else:
            reject(place, f'has no fields (it is {kind_of(value)}); write lines such as {{"text": "..."}}')


def read_csv(file: SourceFile, reject: Reject = refuse) -> Iterator[Record]:
    """Yield the rows of a CSV (commas) or TSV (tabs) file whose first row names the columns; quotes as in RFC 4180."""
    rows = _csv_rows(file)
    names: list[str] | None = None
    while True:
        place = Place(file, rows.line_num + 1)
        try:
            row = next(rows, None)
        except csv.Error as error:
            # Without the names of the columns, no other row can be read.
            (refuse if names is None else reject)(
                place, f"is not a row of a table ({error}); quote values as in RFC 4180"
            )
            continue
        if row is None:
            return
        if not row:
            continue
        undecoded = _undecoded(row)
        if names is None:
            names = row
            if undecoded or len(set(names)) < len(names):
                problem = "is not UTF-8 text" if undecoded else "names a column twice"
                refuse(place, f"{problem} ({_shown(names)}); repair the first row")
        elif undecoded:
            reject(place, "is not UTF-8 text; convert the file")
        elif len(row) != len(names):
            reject(
                place,
                f"has {len(row)} values, but the table has {len(names)} columns ({_shown(names)}); "
                "quote values that hold the separator or a line end",
            )
        else:
            yield Record(dict(zip(names, row, strict=True)), place)


def csv_columns(file: SourceFile) -> list[str]:
    """Names of the columns of a CSV or TSV file, from its first row.

    Raises:
        DataError: the file cannot be read, or its first line is not a row of a table.
    """
    try:
        return next(filter(None, _csv_rows(file)), [])
    except csv.Error as error:
        raise DataError(f"data.sources: the first line of {file.name} is not a row of a table ({error})") from error


class _CsvRows(Iterator[list[str]], Protocol):
    """Iterator over the rows of a CSV table, which counts the lines read so far."""

    line_num: int


def _csv_rows(file: SourceFile) -> _CsvRows:
    # The limit is global to the process, and its default of 128 KiB is too small for columns of texts.
    csv.field_size_limit(max(csv.field_size_limit(), MAX_LINE))
    # Invalid UTF-8 is found in the decoded row; raising here would lose the lines after it.
    lines = (
        line.content.decode("utf-8-sig" if line.number == 1 else "utf-8", "surrogateescape")
        for line in read_lines(file)
    )
    return csv.reader(lines, delimiter="\t" if file.format == "tsv" else ",", strict=True)


def _undecoded(row: list[str]) -> bool:
    try:
        "".join(row).encode()
    except UnicodeEncodeError:
        return True
    return False


def _shown(names: list[str]) -> str:
    return ", ".join(name[:40] for name in names[:20]).encode(errors="replace").decode()
