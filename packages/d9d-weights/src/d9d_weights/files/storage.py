"""Where checkpoints lie: a place that holds named folders of files, each there whole or not at all."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO, Protocol

from d9d_core.errors import CheckpointError

#: The file that makes a checkpoint exist; written last.
MANIFEST = "manifest.json"


class Draft(Protocol):
    """A folder in the making. All ranks write files; one rank does the rest."""

    def start(self) -> None:
        """Begin with an empty folder. One rank, before all others."""

    def create(self, file: str) -> AbstractContextManager[BinaryIO]:
        """A new file, which is safe from a crash when the block is left."""

    def size(self, file: str) -> int | None:
        """Bytes of a file as this rank sees it; ``None`` if it does not."""

    def publish(self, manifest: bytes) -> None:
        """Add the manifest and make the folder exist, in the place of one of that name. One rank, after all others.

        Raises:
            CheckpointError: somebody else works with the place.
        """

    def discard(self) -> None:
        """Remove what a failure left. One rank, when no other writes any more; never fails."""


class Storage(Protocol):
    """A place for folders."""

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
        """The folders that exist, those that were set aside left out."""

    def location(self, name: str) -> str:
        """What people call a folder."""

    def draft(self, name: str) -> Draft:
        """A folder in the making; touches nothing yet."""

    def open(self, name: str, file: str) -> BinaryIO:
        """Read a file of a folder; can be positioned.

        Raises:
            FileNotFoundError: there is none.
        """

    def set_aside(self, name: str) -> str:
        """Have a folder count no more, without losing it; returns its new location. One rank."""

    def remove(self, name: str) -> None:
        """Remove a folder; what remains if that is interrupted counts no more. One rank."""


def open_storage(directory: Path | str) -> Storage:
    """A local directory, or whatever fsspec makes of an address such as ``s3://bucket/run``.

    Raises:
        CheckpointError: fsspec knows no such kind of address, or its driver is not installed.
    """
    if isinstance(directory, str) and "://" in directory:
        from d9d_weights.files.storage_remote import RemoteStorage

        try:
            return RemoteStorage(directory)
        except (ImportError, ValueError) as error:
            raise CheckpointError(f"checkpoints cannot be kept at {directory}: {error}") from error
    from d9d_weights.files.storage_local import LocalStorage

    return LocalStorage(Path(directory))
