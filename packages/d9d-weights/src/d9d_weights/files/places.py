"""Where a model directory lies: local, or behind an fsspec address. Read only."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

from d9d_core.errors import CheckpointError

from d9d_weights.files.safetensors import Source


class OpenFile(Source, Protocol):
    """A file that many threads may read."""

    def close(self) -> None:
        """Give its resources back."""


class Place(Protocol):
    """A directory. All methods raise :class:`CheckpointError` with the reason if it cannot be read."""

    def names(self) -> list[str]:
        """The files directly in it, sorted."""

    def read(self, name: str) -> bytes:
        """The content of a small file."""

    def open(self, name: str) -> OpenFile:
        """A large file."""


def open_place(location: str | Path) -> Place:
    """A local directory, or an fsspec address if it has ``://``.

    Raises:
        CheckpointError: fsspec knows no such kind of address, or its driver is not installed.
    """
    if isinstance(location, str) and "://" in location:
        return RemotePlace(location)
    return LocalPlace(Path(location))


class LocalPlace:
    """A directory of this machine.

    Args:
        path: of the directory.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def __str__(self) -> str:
        return str(self._path)

    def names(self) -> list[str]:
        """See :class:`Place`."""
        with _explained(self):
            return sorted(path.name for path in self._path.iterdir() if path.is_file())

    def read(self, name: str) -> bytes:
        """See :class:`Place`."""
        with _explained(f"{self}/{name}"):
            return (self._path / name).read_bytes()

    def open(self, name: str) -> OpenFile:
        """See :class:`Place`."""
        with _explained(f"{self}/{name}"):
            return LocalFile(self._path / name)


class RemotePlace:
    """A prefix of an object store, or any other place that fsspec reaches.

    Args:
        url: such as ``s3://bucket/model``.
    """

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]

        self._url = url.rstrip("/")
        with _explained(url):
            self._files, self._root = url_to_fs(self._url)

    def __str__(self) -> str:
        return self._url

    def names(self) -> list[str]:
        """See :class:`Place`."""
        with _explained(self):
            self._files.invalidate_cache()
            found = self._files.ls(self._root, detail=True)
            return sorted(entry["name"].rpartition("/")[2] for entry in found if entry["type"] == "file")

    def read(self, name: str) -> bytes:
        """See :class:`Place`."""
        with _explained(f"{self}/{name}"):
            return cast("bytes", self._files.cat_file(f"{self._root}/{name}"))

    def open(self, name: str) -> OpenFile:
        """See :class:`Place`."""
        with _explained(f"{self}/{name}"):
            # Windows are read once, so reading ahead would fetch bytes that nobody asked for.
            return RemoteFile(self._files.open(f"{self._root}/{name}", "rb", cache_type="none"), f"{self}/{name}")


class LocalFile:
    """Reads at a position of its own each time, so threads do not wait for each other."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def size(self) -> int:
        """See :class:`~d9d_weights.files.safetensors.Source`."""
        return os.fstat(self._descriptor).st_size

    def read_into(self, start: int, view: memoryview) -> int:
        """See :class:`~d9d_weights.files.safetensors.Source`."""
        with _explained(self._path):
            return os.preadv(self._descriptor, [view], start)

    def close(self) -> None:
        """See :class:`OpenFile`."""
        os.close(self._descriptor)


class RemoteFile:
    """Has one position, so one thread reads at a time."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file: Any = file
        self._name = name
        self._lock = threading.Lock()

    def size(self) -> int:
        """See :class:`~d9d_weights.files.safetensors.Source`."""
        with self._lock, _explained(self._name):
            return int(self._file.seek(0, 2))

    def read_into(self, start: int, view: memoryview) -> int:
        """See :class:`~d9d_weights.files.safetensors.Source`."""
        with self._lock, _explained(self._name):
            self._file.seek(start)
            return int(self._file.readinto(view))

    def close(self) -> None:
        """See :class:`OpenFile`."""
        self._file.close()


@contextmanager
def _explained(what: object) -> Iterator[None]:
    """Drivers raise whatever their client library raises."""
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointError(f"{what} is not there: check the path, or download the model first") from error
    except ImportError as error:
        raise CheckpointError(f"{what} cannot be reached: {error}; install the driver of such addresses") from error
    except Exception as error:
        raise CheckpointError(f"{what} cannot be read: {type(error).__name__}: {error}") from error
