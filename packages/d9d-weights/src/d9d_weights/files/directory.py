"""Directories of files, local or behind an fsspec address: read, written as a whole, or kept as a store of several.

Three protocols, each with a local and a remote implementation (:mod:`.local`, :mod:`.remote`, chosen by :mod:`.open`):
a :class:`Directory` is read, a :class:`Draft` becomes a directory when it is complete, and a :class:`DirectoryStore`
holds named directories, such as the checkpoints of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO, Protocol

from d9d_weights.files.safetensors import Source

#: The file that makes a directory of a store exist; written last.
MANIFEST = "manifest.json"


class OpenFile(Source, Protocol):
    """A file that many threads may read."""

    def close(self) -> None:
        """Give its resources back."""


class Directory(Protocol):
    """A directory to read from. All methods raise :class:`CheckpointError` with the reason if it cannot be read."""

    def names(self) -> list[str]:
        """The files directly in it, sorted."""

    def read(self, name: str) -> bytes:
        """The content of a small file."""

    def open(self, name: str) -> OpenFile:
        """A large file."""


class Draft(Protocol):
    """A directory in the making. All ranks create files; one rank does the rest."""

    def start(self) -> None:
        """Begin. One rank, before all others."""

    def create(self, file: str) -> AbstractContextManager[BinaryIO]:
        """A new file, which is safe from a crash when the block is left."""

    def size(self, file: str) -> int | None:
        """Bytes of a file as this rank sees it, ``None`` if it does not."""

    def add(self, save: Callable[[Path], None]) -> set[str]:
        """Add whatever ``save`` writes into the directory that it is given. One rank.

        Returns:
            Names of the files and folders at the top that it wrote, or that were there before.
        """

    def publish(self, last: Mapping[str, bytes]) -> None:
        """Add small files, in this order, and make the directory exist, in place of an earlier one. One rank, last.

        Raises:
            CheckpointError: somebody else writes to the same place.
        """

    def discard(self) -> None:
        """Remove what a failure left. One rank, when no other writes any more; never fails."""


class DirectoryStore(Protocol):
    """A place for named directories, each there whole or not at all."""

    def prepare(self) -> None:
        """Create the place and try whether it can be written. One rank.

        Raises:
            OSError: it cannot.
        """

    def is_visible(self) -> bool:
        """Whether this rank sees the place."""

    def owned(self) -> AbstractContextManager[None]:
        """Be the only one who works with the place, and clear up what a killed process left. One rank.

        Raises:
            CheckpointError: another process works with it.
        """

    def names(self) -> list[str]:
        """The directories that exist, those that were set aside left out."""

    def location(self, name: str) -> str:
        """Path or address of a directory."""

    def draft(self, name: str) -> Draft:
        """A directory in the making; touches nothing yet."""

    def open(self, name: str, file: str) -> BinaryIO:
        """Read a file of a directory; can be positioned.

        Raises:
            FileNotFoundError: there is none.
        """

    def set_aside(self, name: str) -> str:
        """Have a directory count no more, without losing it; returns its new location. One rank."""

    def remove(self, name: str) -> None:
        """Remove a directory; what remains if that is interrupted counts no more. One rank."""
