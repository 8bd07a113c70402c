"""Choice between local paths and fsspec addresses: a location with ``://`` is an address."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from d9d_core.errors import CheckpointError

from d9d_weights.files.directory import Directory, DirectoryStore, Draft
from d9d_weights.files.local import LocalDirectory, LocalDraft, LocalStore


def open_directory(location: str | Path) -> Directory:
    """Open a directory for reading.

    Raises:
        CheckpointError: fsspec does not support this kind of address, or its driver is not installed.
    """
    if _is_address(location):
        from d9d_weights.files.remote import RemoteDirectory  # imported late, because fsspec takes a while to import

        return RemoteDirectory(str(location))
    return LocalDirectory(Path(location))


def open_draft(location: str | Path, earlier: Callable[[list[str]], list[str]]) -> Draft:
    """Open a draft of a directory.

    Args:
        location: path or address of the directory; an existing one is replaced.
        earlier: only for addresses, function that selects the files of an earlier version from the names of the
            existing files. The draft removes these files in the returned order.

    Raises:
        CheckpointError: fsspec does not support this kind of address, or its driver is not installed.
    """
    if _is_address(location):
        from d9d_weights.files.remote import remote_draft

        return remote_draft(str(location), earlier)
    return LocalDraft(Path(location))


def open_store(location: str | Path) -> DirectoryStore:
    """Open a store of named directories.

    Raises:
        CheckpointError: fsspec does not support this kind of address, or its driver is not installed.
    """
    if _is_address(location):
        from d9d_weights.files.remote import RemoteStore

        try:
            return RemoteStore(str(location))
        except Exception as error:  # drivers raise exceptions of any type
            reason = str(error) or type(error).__name__
            raise CheckpointError(
                f"checkpoints cannot be stored at {location}: {reason}; use another address"
            ) from error
    return LocalStore(Path(location))


def _is_address(location: str | Path) -> bool:
    return isinstance(location, str) and "://" in location
