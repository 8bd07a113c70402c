"""Interfaces of directories, local or at an fsspec address: to read them, to write them, and to store several.

The interfaces have a local and a remote implementation (:mod:`d9d_weights.files.local`,
:mod:`d9d_weights.files.remote`); :mod:`d9d_weights.files.open` chooses between both. A :class:`Directory` is read, a
:class:`Draft` becomes a directory once it is complete, and a :class:`DirectoryStore` holds named directories, such as
the checkpoints of a run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO, Protocol

from d9d_weights.files.safetensors import Source

#: File whose presence makes a directory of a store complete; written last.
MANIFEST = "manifest.json"
_SET_ASIDE = re.compile(r".+\.damaged(-[0-9]+)?")


def is_set_aside(name: str) -> bool:
    """Whether a name is the name of a local directory that :meth:`DirectoryStore.set_aside` renamed."""
    return _SET_ASIDE.fullmatch(name) is not None


class OpenFile(Source, Protocol):
    """Open file that several threads may read at the same time."""

    def close(self) -> None:
        """Close the file."""


class Directory(Protocol):
    """Directory to read. All methods raise :class:`~d9d_core.errors.CheckpointError` if it cannot be read."""

    def names(self) -> list[str]:
        """Sorted names of the files in the directory, without subdirectories."""

    def read(self, name: str) -> bytes:
        """Read the whole contents of a small file of the directory."""

    def open(self, name: str) -> OpenFile:
        """Open a large file of the directory, to read parts of it."""


class Draft(Protocol):
    """Draft of a directory. All ranks create files; one rank calls the other methods."""

    def start(self) -> None:
        """Begin the draft. Called by one rank, before other ranks create files."""

    def create(self, file: str) -> AbstractContextManager[BinaryIO]:
        """Create a file of the draft; after the ``with`` block, the file survives a crash."""

    def size(self, file: str) -> int | None:
        """Size of a file of the draft in bytes; ``None`` if this rank does not see the file."""

    def add(self, save: Callable[[Path], None]) -> set[str]:
        """Add the files that ``save`` writes into a directory. Called by one rank.

        Args:
            save: function that receives the directory.

        Returns:
            Names of the files and directories at the top of the draft that ``save`` wrote, or of all at the top.
        """

    def publish(self, last: Mapping[str, bytes]) -> None:
        """Add small files in this order, and replace the published directory by the draft. Called last, by one rank.

        Raises:
            CheckpointError: another process writes to the same location.
        """

    def discard(self) -> None:
        """Remove a failed draft. Called by one rank, once no other rank writes; never raises."""


class DirectoryStore(Protocol):
    """Store of named directories, each complete or absent."""

    def prepare(self) -> str:
        """Create the store, and write a file with a random name, which shows that the store can be written.

        Called by one rank. Each other rank looks for the file, so that a directory of its own is noticed.

        Returns:
            Name of the file, for :meth:`is_visible` and :meth:`forget`.

        Raises:
            OSError: the store cannot be written.
        """

    def is_visible(self, probe: str) -> bool:
        """Whether this rank sees the file that :meth:`prepare` wrote on another rank."""

    def forget(self, probe: str) -> None:
        """Remove the file that :meth:`prepare` wrote. Called by one rank; never raises."""

    def owned(self) -> AbstractContextManager[None]:
        """Own the store inside the ``with`` block, and clean up after a killed process. Called by one rank.

        Raises:
            CheckpointError: another process owns the store.
        """

    def unfinished(self) -> list[str]:
        """Sorted names of absent directories whose writer was killed; :meth:`owned` or the next draft removes them."""

    def names(self) -> list[str]:
        """Names of the directories in the store; in a local store, also of temporary and set-aside directories."""

    def location(self, name: str) -> str:
        """Path or address of a directory of the store."""

    def draft(self, name: str) -> Draft:
        """Return a draft of a directory, without writing yet."""

    def open(self, name: str, file: str) -> BinaryIO:
        """Open a file of a directory for reading; the result is seekable.

        Raises:
            FileNotFoundError: the file does not exist.
        """

    def set_aside(self, name: str) -> str:
        """Set a directory aside, so that it is ignored but not lost. Returns its new location. Called by one rank."""

    def remove(self, name: str) -> None:
        """Remove a directory; after an interruption, its remains are ignored. Called by one rank."""
