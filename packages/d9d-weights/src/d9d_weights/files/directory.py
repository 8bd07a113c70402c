"""Directories of files, local or behind an fsspec address: read, published at once, or kept as a store of several.

Three protocols, each with a local and a remote implementation (:mod:`d9d_weights.files.local`,
:mod:`d9d_weights.files.remote`), between which :mod:`d9d_weights.files.open` chooses: a :class:`Directory` is read, a
:class:`Draft` becomes a directory when it is complete, and a :class:`DirectoryStore` holds named directories, such as
the checkpoints of a run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO, Protocol

from d9d_weights.files.safetensors import Source

#: The file that makes a directory of a store exist; written last.
MANIFEST = "manifest.json"
_SET_ASIDE = re.compile(r".+\.damaged(-[0-9]+)?")


def is_set_aside(name: str) -> bool:
    """Whether a local directory has the name of one that was set aside."""
    return _SET_ASIDE.fullmatch(name) is not None


class OpenFile(Source, Protocol):
    """A file that many threads may read."""

    def close(self) -> None:
        """Close the file."""


class Directory(Protocol):
    """Directory to read from. All methods raise :class:`~d9d_core.errors.CheckpointError` if it cannot be read."""

    def names(self) -> list[str]:
        """Names of the files directly in the directory, sorted."""

    def read(self, name: str) -> bytes:
        """Read a small file."""

    def open(self, name: str) -> OpenFile:
        """Open a large file."""


class Draft(Protocol):
    """Draft of a directory. All ranks create files; one rank does the rest."""

    def start(self) -> None:
        """Begin the draft. One rank, before all others."""

    def create(self, file: str) -> AbstractContextManager[BinaryIO]:
        """Create a file, which is safe from a crash when the block is left."""

    def size(self, file: str) -> int | None:
        """Bytes of a file as this rank sees it, ``None`` if it does not."""

    def add(self, save: Callable[[Path], None]) -> set[str]:
        """Add whatever ``save`` writes into the directory that it is given. One rank.

        Returns:
            Names of the files and folders at the top that it wrote, or that were there before.
        """

    def publish(self, last: Mapping[str, bytes]) -> None:
        """Add small files, in this order, and make the directory exist, replacing an earlier one. One rank, last.

        Raises:
            CheckpointError: somebody else writes to the same location.
        """

    def discard(self) -> None:
        """Remove what a failure left. One rank, when no other writes any more; never fails."""


class DirectoryStore(Protocol):
    """Store of named directories, each complete or absent."""

    def prepare(self) -> None:
        """Create the store and try whether it can be written. One rank.

        Raises:
            OSError: it cannot.
        """

    def is_visible(self) -> bool:
        """Whether this rank sees the store."""

    def owned(self) -> AbstractContextManager[None]:
        """Own the store while the block runs, and clear up what a killed process left. One rank.

        Raises:
            CheckpointError: another process works with it.
        """

    def names(self) -> list[str]:
        """Names of the directories that exist, without those that were set aside."""

    def location(self, name: str) -> str:
        """Path or address of a directory."""

    def draft(self, name: str) -> Draft:
        """Draft of a directory; touches nothing yet."""

    def open(self, name: str, file: str) -> BinaryIO:
        """Read a file of a directory; can be positioned.

        Raises:
            FileNotFoundError: there is none.
        """

    def set_aside(self, name: str) -> str:
        """Set a directory aside, so that it counts no more without being lost; returns its new location. One rank."""

    def remove(self, name: str) -> None:
        """Remove a directory; what remains if that is interrupted counts no more. One rank."""
