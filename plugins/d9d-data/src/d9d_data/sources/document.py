"""Documents: bytes that identify them, and the text in them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from d9d_core.extend import DataError, parse_json


class Document(Protocol):
    """Document of a corpus. Both methods may be called again, and read again."""

    @property
    def name(self) -> str:
        """Name of the document in messages."""
        ...

    @property
    def kind(self) -> str:
        """Kind of conversion from bytes to text: equal kind and bytes mean equal text."""
        ...

    def raw(self) -> bytes:
        """Bytes that the text is made from: cheap to get, hashed to recognise the corpus."""
        ...

    def text(self) -> str:
        """Text of the document."""
        ...


@dataclass(frozen=True, slots=True)
class FileDocument:
    """Source document: the text of a UTF-8 file."""

    path: Path

    @property
    def name(self) -> str:
        """Path of the file."""
        return str(self.path)

    @property
    def kind(self) -> str:
        """Kind of a whole file."""
        return "text"

    def raw(self) -> bytes:
        """Bytes of the file.

        Raises:
            DataError: the file cannot be read.
        """
        try:
            return self.path.read_bytes()
        except OSError as error:
            raise _unreadable(self.path, error) from error

    def text(self) -> str:
        """Decoded file, without a byte-order mark.

        Raises:
            DataError: the file is not UTF-8.
        """
        try:
            return self.raw().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise DataError(
                f"data.sources: {self.path} is not UTF-8 text (byte {error.start}: {error.reason}); "
                "convert it, or name only text files, for example with a glob such as 'corpus/**/*.txt'"
            ) from error


@dataclass(frozen=True, slots=True)
class LineDocument:
    """Source document in one line of a ``.jsonl`` file: a JSON object with the text in its field ``text``.

    Attributes:
        path: the file.
        number: number of the line, from 1.
        begin, end: the bytes of the line in the file.
    """

    path: Path
    number: int
    begin: int
    end: int

    @property
    def name(self) -> str:
        """Path of the file and number of the line."""
        return f"{self.path}:{self.number}"

    @property
    def kind(self) -> str:
        """Kind of a JSON line."""
        return "jsonl"

    def raw(self) -> bytes:
        """Bytes of the line.

        Raises:
            DataError: the file cannot be read.
        """
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(self.begin)
                return file.read(self.end - self.begin)
        except OSError as error:
            raise _unreadable(self.path, error) from error

    def text(self) -> str:
        """Field ``text`` of the line.

        Raises:
            DataError: the line is no JSON object with such a field.
        """
        try:
            value = parse_json(self.raw())
        except ValueError as error:
            raise DataError(f"data.sources: {self.name} is not JSON ({error}); write one object a line") from error
        text = value.get("text") if isinstance(value, dict) else None
        if not isinstance(text, str):
            fields = ", ".join(map(str, value)) or "none" if isinstance(value, dict) else f"a {type(value).__name__}"
            raise DataError(
                f"data.sources: {self.name} has no text in a field 'text' (it has {fields}); "
                'write lines such as {"text": "..."}'
            )
        return text


def lines_of(path: Path) -> list[Document]:
    """Lines of a ``.jsonl`` file, empty ones left out.

    Raises:
        DataError: the file cannot be read.
    """
    found: list[Document] = []
    begin = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    found.append(LineDocument(path, number, begin, begin + len(line)))
                begin += len(line)
    except OSError as error:
        raise _unreadable(path, error) from error
    return found


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(
        f"data.sources: cannot read {path}: {error.strerror or error}; "
        "make the file readable or take it out of the sources"
    )


@dataclass(frozen=True, slots=True)
class InlineDocument:
    """Document of a text that is in memory already."""

    name: str
    content: str

    @property
    def kind(self) -> str:
        """Kind of plain text."""
        return "text"

    def raw(self) -> bytes:
        """Text in UTF-8."""
        return self.content.encode()

    def text(self) -> str:
        """Text of the document."""
        return self.content
