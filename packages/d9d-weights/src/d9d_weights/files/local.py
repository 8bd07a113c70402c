"""Directories on a local or shared file system; they appear by a rename after all files are synced."""

from __future__ import annotations

import itertools
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from d9d_core.errors import CheckpointError
from d9d_core.untrusted import open_regular, read_regular

from d9d_weights.files.atomic import clear, create, move, remove_leftovers, replace, sync
from d9d_weights.files.directory import MANIFEST, OpenFile
from d9d_weights.files.failures import unreadable
from d9d_weights.files.lock import exclusive


class LocalDirectory:
    """Local directory of files.

    Args:
        path: path of the directory.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def __str__(self) -> str:
        return str(self._path)

    def names(self) -> list[str]:
        """Sorted names of the files in the directory, without subdirectories."""
        with unreadable(self):
            return sorted(path.name for path in self._path.iterdir() if path.is_file())

    def read(self, name: str) -> bytes:
        """Read the whole contents of a small file of the directory."""
        with unreadable(f"{self}/{name}"):
            return read_regular(self._path / name, links="near")

    def open(self, name: str) -> OpenFile:
        """Open a large file of the directory, to read parts of it."""
        with unreadable(f"{self}/{name}"):
            return LocalFile(self._path / name)


class LocalFile:
    """Local file read at explicit positions, so that threads need not wait for each other."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = open_regular(path)

    def size(self) -> int:
        """Size of the file in bytes."""
        return os.fstat(self._descriptor).st_size

    def read_into(self, start: int, view: memoryview) -> int:
        """Fill the beginning of ``view`` with bytes from position ``start``; returns their number, 0 at the end."""
        with unreadable(self._path):
            return os.preadv(self._descriptor, [view], start)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


class LocalDraft:
    """Local draft: a hidden directory next to the target, which replaces the target once all files are complete.

    Args:
        target: directory to create or replace.
    """

    def __init__(self, target: Path) -> None:
        self._target = target.absolute()
        self._draft = self._target.with_name(f".{self._target.name}.tmp")

    def start(self) -> None:
        """Begin the draft. Called by one rank, before other ranks create files."""
        clear(self._draft)
        self._draft.mkdir(parents=True)

    @contextmanager
    def create(self, file: str) -> Iterator[BinaryIO]:
        """Create a file of the draft; after the ``with`` block, the file survives a crash."""
        if not self._draft.is_dir():
            raise CheckpointError(
                f"{self._draft} does not exist; one process must call start() first, in a directory that all "
                "processes see"
            )
        path = self._draft / file
        try:
            with path.open("wb") as out:
                yield out
                out.flush()
                os.fsync(out.fileno())
        except BaseException:
            path.unlink(missing_ok=True)  # remove it: an incomplete file could have the full size
            raise

    def size(self, file: str) -> int | None:
        """Size of a file of the draft in bytes; ``None`` if this rank does not see the file."""
        path = self._draft / file
        return path.stat().st_size if path.is_file() else None

    def add(self, save: Callable[[Path], None]) -> set[str]:
        """Add the files that ``save`` writes into a directory. Called by one rank."""
        before = set(self._draft.rglob("*"))
        save(self._draft)
        for path in set(self._draft.rglob("*")) - before:
            sync(path)
        return {path.name for path in self._draft.iterdir()}

    def publish(self, last: Mapping[str, bytes]) -> None:
        """Add small files in this order, and replace the published directory by the draft. Called last, by one rank."""
        for name, content in last.items():
            with self.create(name) as out:
                out.write(content)
        sync(self._draft)
        replace(self._target, self._draft)

    def discard(self) -> None:
        """Remove a failed draft. Called by one rank, once no other rank writes; never raises."""
        clear(self._draft)


class LocalStore:
    """Local store of directories on a file system with atomic renames.

    Args:
        directory: path of the store, created by :meth:`prepare` or by the first draft.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._unfinished: list[str] = []

    def __str__(self) -> str:
        return str(self.directory)

    def prepare(self) -> str:
        """Create the store, and write an empty file with a random name. Called by one rank."""
        self.directory.mkdir(parents=True, exist_ok=True)
        probe = f".probe-{secrets.token_hex(8)}.tmp"
        create(self.directory / probe, b"")
        return probe

    def is_visible(self, probe: str) -> bool:
        """Whether this rank sees the file that :meth:`prepare` wrote on another rank."""
        return (self.directory / probe).is_file()

    def forget(self, probe: str) -> None:
        """Remove the file that :meth:`prepare` wrote. Called by one rank; never raises."""
        clear(self.directory / probe)

    @contextmanager
    def owned(self) -> Iterator[None]:
        """Own the store inside the ``with`` block, by a lock that ends with the process. Called by one rank."""
        busy = f"{self.directory} is in use by another training run; stop it, or choose another run.name"
        with exclusive(self.directory / ".lock", busy):
            drafts = [path for path in self.directory.glob(".*.tmp") if path.is_dir()]
            # A temporary directory with a manifest was complete, and was being published or removed.
            names = [path.name[1 : -len(".tmp")] for path in drafts if not (path / MANIFEST).exists()]
            remove_leftovers(self.directory)
            self._unfinished = sorted(name for name in names if not (self.directory / name).exists())
            yield

    def unfinished(self) -> list[str]:
        """Sorted names of absent directories whose writer was killed; :meth:`owned` has removed their files."""
        return self._unfinished

    def names(self) -> list[str]:
        """Names of the directories in the store, including temporary directories and directories set aside."""
        if not self.directory.is_dir():
            return []
        return [path.name for path in self.directory.iterdir() if path.is_dir()]

    def location(self, name: str) -> str:
        """Path or address of a directory of the store."""
        return str(self.directory / name)

    def draft(self, name: str) -> LocalDraft:
        """Return a draft of a directory, without writing yet."""
        return LocalDraft(self.directory / name)

    def open(self, name: str, file: str) -> BinaryIO:
        """Open a file of a directory for reading; the result is seekable."""
        # Checkpoints contain no links, and a link could lead out of the directory.
        return open(open_regular(self.directory / name / file, links="none"), "rb")  # noqa: PTH123 - a descriptor

    def set_aside(self, name: str) -> str:
        """Set a directory aside, so that it is ignored but not lost. Returns its new location. Called by one rank."""
        source = self.directory / name
        numbers = itertools.count(2)
        target = self.directory / f"{name}.damaged"
        while os.path.lexists(target):
            target = self.directory / f"{name}.damaged-{next(numbers)}"
        move(source, target)
        return str(target)

    def remove(self, name: str) -> None:
        """Remove a directory; after an interruption, its remains are ignored. Called by one rank."""
        # Renamed first, so that incomplete remains are recognised as leftovers, not as a damaged checkpoint.
        doomed = self.directory / f".{name}.tmp"
        clear(doomed)
        move(self.directory / name, doomed)
        # Removed without clear(), which ignores errors: they must reach the caller.
        if doomed.is_symlink():
            doomed.unlink()
        else:
            shutil.rmtree(doomed)
