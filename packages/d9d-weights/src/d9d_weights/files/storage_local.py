"""Folders in a directory that all processes see: they appear by one rename, after everything is on the disk."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from d9d_weights.files.atomic import exclusive, remove_leftovers, replace, sync
from d9d_weights.files.storage import MANIFEST


class LocalDraft:
    """A hidden directory that is renamed when it is complete.

    Args:
        target: the directory that it becomes.
    """

    def __init__(self, target: Path) -> None:
        self._target = target
        self._place = target.with_name(f".{target.name}.tmp")

    def start(self) -> None:
        """See :class:`~d9d_weights.files.storage.Draft`."""
        shutil.rmtree(self._place, ignore_errors=True)
        self._place.mkdir(parents=True)

    @contextmanager
    def create(self, file: str) -> Iterator[BinaryIO]:
        """See :class:`~d9d_weights.files.storage.Draft`."""
        with (self._place / file).open("wb") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())

    def size(self, file: str) -> int | None:
        """See :class:`~d9d_weights.files.storage.Draft`."""
        path = self._place / file
        return path.stat().st_size if path.is_file() else None

    def publish(self, manifest: bytes) -> None:
        """See :class:`~d9d_weights.files.storage.Draft`."""
        with self.create(MANIFEST) as out:
            out.write(manifest)
        sync(self._place)
        replace(self._target, self._place)

    def discard(self) -> None:
        """See :class:`~d9d_weights.files.storage.Draft`."""
        shutil.rmtree(self._place, ignore_errors=True)


class LocalStorage:
    """A directory of a file system with atomic renames.

    Args:
        directory: created by :meth:`prepare` or by the first draft.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __str__(self) -> str:
        return str(self.directory)

    def prepare(self) -> None:
        """See :class:`~d9d_weights.files.storage.Storage`."""
        self.directory.mkdir(parents=True, exist_ok=True)
        probe = self.directory / ".probe.tmp"
        probe.write_bytes(b"")
        probe.unlink()

    def is_visible(self) -> bool:
        """See :class:`~d9d_weights.files.storage.Storage`."""
        return self.directory.is_dir()

    @contextmanager
    def owned(self) -> Iterator[None]:
        """See :class:`~d9d_weights.files.storage.Storage`. The lock goes with the process, however it ends."""
        busy = f"{self.directory} is in use by another training run; stop it, or choose another run.name"
        with exclusive(self.directory / ".lock", busy):
            remove_leftovers(self.directory)
            yield

    def names(self) -> list[str]:
        """See :class:`~d9d_weights.files.storage.Storage`."""
        if not self.directory.is_dir():
            return []
        return [path.name for path in self.directory.iterdir() if path.is_dir()]

    def location(self, name: str) -> str:
        """See :class:`~d9d_weights.files.storage.Storage`."""
        return str(self.directory / name)

    def draft(self, name: str) -> LocalDraft:
        """See :class:`~d9d_weights.files.storage.Storage`."""
        return LocalDraft(self.directory / name)

    def open(self, name: str, file: str) -> BinaryIO:
        """See :class:`~d9d_weights.files.storage.Storage`."""
        return (self.directory / name / file).open("rb")

    def set_aside(self, name: str) -> str:
        """See :class:`~d9d_weights.files.storage.Storage`."""
        target = self.directory / f"{name}.damaged"
        shutil.rmtree(target, ignore_errors=True)
        return str((self.directory / name).rename(target))

    def remove(self, name: str) -> None:
        """See :class:`~d9d_weights.files.storage.Storage`."""
        # Under this name, what remains of it is a leftover and no damaged checkpoint.
        doomed = self.directory / f".{name}.tmp"
        (self.directory / name).rename(doomed)
        shutil.rmtree(doomed)
