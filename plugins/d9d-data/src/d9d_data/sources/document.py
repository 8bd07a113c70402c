"""A document: bytes that identify it, and the text in them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from d9d_core.errors import DataError


class Document(Protocol):
    """One document of a corpus. Both methods may be called again, and read again."""

    @property
    def name(self) -> str:
        """How messages call it."""
        ...

    @property
    def kind(self) -> str:
        """Which way the text is made from the bytes: equal kind and bytes mean equal text."""
        ...

    def raw(self) -> bytes:
        """The bytes that the text is made from: cheap to get, hashed to recognise the corpus."""
        ...

    def text(self) -> str:
        """The text."""
        ...


@dataclass(frozen=True, slots=True)
class FileDocument:
    """A UTF-8 file."""

    path: Path

    @property
    def name(self) -> str:
        """The path."""
        return str(self.path)

    @property
    def kind(self) -> str:
        """The whole file is the text."""
        return "text"

    def raw(self) -> bytes:
        """The bytes of the file.

        Raises:
            DataError: the file cannot be read.
        """
        try:
            return self.path.read_bytes()
        except OSError as error:
            raise DataError(
                f"data.sources: cannot read {self.path}: {error.strerror or error}; "
                "make the file readable or take it out of the sources"
            ) from error

    def text(self) -> str:
        """The decoded file, without a byte-order mark.

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
class InlineDocument:
    """A text that is in memory already."""

    name: str
    content: str

    @property
    def kind(self) -> str:
        """The bytes are the text."""
        return "text"

    def raw(self) -> bytes:
        """The text in UTF-8."""
        return self.content.encode()

    def text(self) -> str:
        """The text."""
        return self.content
