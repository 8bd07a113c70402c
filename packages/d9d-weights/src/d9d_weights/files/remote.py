"""Directories at fsspec addresses, such as object stores: without rename and locks; the last file completes them."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import secrets
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from d9d_core.errors import CheckpointError
from d9d_core.untrusted import MAX_JSON_BYTES
from fsspec.core import url_to_fs  # type: ignore[import-untyped]

from d9d_weights.files.directory import MANIFEST, OpenFile
from d9d_weights.files.failures import as_os_error, unreadable, unwritable

_OWNER = "owner.json"
#: Marker file in a directory that was set aside, because an object store cannot rename gigabytes.
_DAMAGED = "damaged"


class RemoteDirectory:
    """Remote directory: a prefix of an object store, or another address that fsspec supports.

    Args:
        url: address, such as ``s3://bucket/model``.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        with unreadable(url):
            self._files, self._root = url_to_fs(self._url)

    def __str__(self) -> str:
        return self._url

    def names(self) -> list[str]:
        """Sorted names of the files in the directory, without subdirectories."""
        with unreadable(self):
            self._files.invalidate_cache()
            found = self._files.ls(self._root, detail=True)
            return sorted(entry["name"].rpartition("/")[2] for entry in found if entry["type"] == "file")

    def read(self, name: str) -> bytes:
        """Read the whole contents of a small file of the directory."""
        with unreadable(f"{self}/{name}"):
            with self._files.open(f"{self._root}/{name}", "rb") as file:
                content: bytes = file.read(MAX_JSON_BYTES + 1)
            if len(content) > MAX_JSON_BYTES:
                raise OSError(f"it has more than {MAX_JSON_BYTES:,} bytes, too many for this kind of file")
            return content

    def open(self, name: str) -> OpenFile:
        """Open a large file of the directory, to read parts of it."""
        with unreadable(f"{self}/{name}"):
            # No cache: each window of the file is read once, so read-ahead would fetch unused bytes.
            return RemoteFile(self._files.open(f"{self._root}/{name}", "rb", cache_type="none"), f"{self}/{name}")


class RemoteFile:
    """Remote file. Its stream has one position, so only one thread reads at a time."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file: Any = file
        self._name = name
        self._lock = threading.Lock()

    def size(self) -> int:
        """Size of the file in bytes."""
        with self._lock, unreadable(self._name):
            return int(self._file.seek(0, 2))

    def read_into(self, start: int, view: memoryview) -> int:
        """Fill the beginning of ``view`` with bytes from position ``start``; returns their number, 0 at the end."""
        with self._lock, unreadable(self._name):
            self._file.seek(start)
            return int(self._file.readinto(view))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class RemoteDraft:
    """Remote draft of a directory at an fsspec address: the directory counts as absent until its last file is written.

    Args:
        files: fsspec file system.
        root: path of the directory within the file system.
        failures: function that returns a context, which converts exceptions of the file system.
        earlier: function that selects the files of an earlier version from the existing names; :meth:`start` and
            :meth:`discard` remove them in the returned order. ``None`` removes the whole directory.
        positioned: whether :meth:`create` yields seekable files, which are first written to a temporary local
            directory.
        check_owner: function that raises if another process took over the store.
    """

    def __init__(
        self,
        files: Any,
        root: str,
        failures: Callable[[], AbstractContextManager[None]] = as_os_error,
        earlier: Callable[[list[str]], list[str]] | None = None,
        positioned: bool = False,
        check_owner: Callable[[], None] = lambda: None,
    ) -> None:
        self._files = files
        self._root = root.rstrip("/")
        self._failures = failures
        self._earlier = earlier
        self._positioned = positioned
        self._check_owner = check_owner

    def start(self) -> None:
        """Begin the draft. Called by one rank, before other ranks create files."""
        self._check_owner()
        with self._failures():
            self._remove()
            self._files.makedirs(self._root, exist_ok=True)

    @contextmanager
    def create(self, file: str) -> Iterator[BinaryIO]:
        """Create a file of the draft; after the ``with`` block, the file survives a crash."""
        if not self._positioned:
            with self._failures(), self._files.open(f"{self._root}/{file}", "wb") as out:
                yield out
            return
        with tempfile.NamedTemporaryFile(suffix=f".{file}") as out:
            yield out  # type: ignore[misc] # behaves like a binary file
            out.flush()
            with self._failures():
                self._files.put_file(out.name, f"{self._root}/{file}")

    def size(self, file: str) -> int | None:
        """Size of a file of the draft in bytes; ``None`` if this rank does not see the file."""
        with self._failures():
            self._files.invalidate_cache()
            try:
                return int(self._files.size(f"{self._root}/{file}"))
            except FileNotFoundError:
                return None

    def add(self, save: Callable[[Path], None]) -> set[str]:
        """Add the files that ``save`` writes into a directory. Called by one rank."""
        with tempfile.TemporaryDirectory() as directory:
            save(Path(directory))
            with self._failures():
                for path in sorted(path for path in Path(directory).rglob("*") if path.is_file()):
                    target = f"{self._root}/{path.relative_to(directory).as_posix()}"
                    self._files.makedirs(target.rpartition("/")[0], exist_ok=True)
                    self._files.put_file(str(path), target)
            return {path.name for path in Path(directory).iterdir()}

    def publish(self, last: Mapping[str, bytes]) -> None:
        """Add small files in this order, and replace the published directory by the draft. Called last, by one rank."""
        self._check_owner()
        with self._failures():
            for name, content in last.items():
                self._files.pipe_file(f"{self._root}/{name}", content)

    def discard(self) -> None:
        """Remove a failed draft. Called by one rank, once no other rank writes; never raises."""
        with contextlib.suppress(Exception):
            self._check_owner()  # raises if another process owns the store: the draft may be its own
            self._remove()

    def _remove(self) -> None:
        self._files.invalidate_cache()
        if self._earlier is None:
            if self._files.exists(self._root):
                remove_directory(self._files, self._root)
            return
        try:
            found = self._files.ls(self._root, detail=False)
        except FileNotFoundError:
            return
        for name in self._earlier([path.rstrip("/").rpartition("/")[2] for path in found]):
            self._files.rm_file(f"{self._root}/{name}")


def remote_draft(url: str, earlier: Callable[[list[str]], list[str]]) -> RemoteDraft:
    """Draft of a directory at an address that belongs to no store. Errors name the address; files are seekable.

    Raises:
        CheckpointError: fsspec does not support this kind of address, or its driver is not installed.
    """
    with unwritable(url):
        files, root = url_to_fs(url.rstrip("/"))
    return RemoteDraft(files, root, lambda: unwritable(url), earlier, positioned=True)


def remove_directory(files: Any, root: str) -> None:
    """Remove a directory of a store; after an interruption, its remains are ignored."""
    files.pipe_file(f"{root}/{_DAMAGED}", b"set aside: a checkpoint before it was used instead")
    files.rm(root, recursive=True)


class RemoteStore:
    """Remote store of directories below a prefix of an object store.

    Object stores have no locks, so the last process to open the store owns it: a file with the owner's random token
    marks the ownership. An earlier owner gets an error before its next write becomes visible.

    Args:
        url: address, such as ``s3://bucket/run/checkpoints`` or ``memory://run``.

    Raises:
        ImportError: the driver is not installed.
        ValueError: fsspec does not support this kind of address.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.files, self._root = url_to_fs(self.url)
        self._me: dict[str, Any] | None = None

    def __str__(self) -> str:
        return self.url

    def path(self, *parts: str) -> str:
        """Path of the store, or of a directory or file in it, within the fsspec file system."""
        return "/".join((self._root.rstrip("/"), *parts))

    def prepare(self) -> str:
        """Create the store, and write a file with a random name. Called by one rank."""
        probe = f"probe-{secrets.token_hex(8)}"
        with as_os_error():
            self.files.makedirs(self.path(), exist_ok=True)
            self.files.pipe_file(self.path(probe), b"probe")
        return probe

    def is_visible(self, probe: str) -> bool:
        """Whether this rank sees the file that :meth:`prepare` wrote on another rank."""
        with as_os_error():
            self.files.invalidate_cache()
            return bool(self.files.exists(self.path(probe)))

    def forget(self, probe: str) -> None:
        """Remove the file that :meth:`prepare` wrote. Called by one rank; never raises."""
        with contextlib.suppress(Exception):
            self.files.rm_file(self.path(probe))

    def unfinished(self) -> list[str]:
        """Sorted names of absent directories whose writer was killed: they lack the manifest, the last file."""
        names = self.names()
        with as_os_error():
            return sorted(name for name in names if not self.files.exists(self.path(name, MANIFEST)))

    @contextmanager
    def owned(self) -> Iterator[None]:
        """Own the store inside the ``with`` block, and clean up after a killed process. Called by one rank."""
        self._me = {"token": secrets.token_hex(8), "host": platform.node(), "process": os.getpid()}
        with as_os_error():
            self.files.pipe_file(self.path(_OWNER), json.dumps(self._me).encode())
        try:
            yield
        finally:
            with contextlib.suppress(Exception):  # the owner's file may be gone, or belong to another process
                self.check_owner()
                self.files.rm_file(self.path(_OWNER))
            self._me = None

    def check_owner(self) -> None:
        """Check that no other process has taken over the store.

        Raises:
            CheckpointError: another process has taken over the store, or the file that names the owner is gone.
        """
        if self._me is None:
            return
        try:
            with as_os_error():
                owner = json.loads(self.files.cat_file(self.path(_OWNER)))
        except FileNotFoundError:
            owner = {}
        if owner.get("token") != self._me["token"]:
            raise CheckpointError(
                f"{self.url} was taken over by another training run ({_named(owner)}); this one is "
                f"{_named(self._me)}: stop one of them, or give it another run.name"
            )

    def names(self) -> list[str]:
        """Names of the directories in the store, without directories that were set aside."""
        with as_os_error():
            self.files.invalidate_cache()
            try:
                found = self.files.ls(self.path(), detail=True)
            except FileNotFoundError:
                return []
            names = [entry["name"].rstrip("/").rpartition("/")[2] for entry in found if entry["type"] == "directory"]
            return [name for name in names if not self.files.exists(self.path(name, _DAMAGED))]

    def location(self, name: str) -> str:
        """Path or address of a directory of the store."""
        return f"{self.url}/{name}"

    def draft(self, name: str) -> RemoteDraft:
        """Return a draft of a directory, without writing yet."""
        return RemoteDraft(self.files, self.path(name), check_owner=self.check_owner)

    def open(self, name: str, file: str) -> BinaryIO:
        """Open a file of a directory for reading; the result is seekable."""
        with as_os_error():
            # No cache: each window of the file is read once, and read-ahead would fetch bytes for other ranks.
            return cast("BinaryIO", self.files.open(self.path(name, file), "rb", cache_type="none"))

    def set_aside(self, name: str) -> str:
        """Set a directory aside, so that it is ignored but not lost. Returns its new location. Called by one rank."""
        with as_os_error():
            self.files.pipe_file(self.path(name, _DAMAGED), b"set aside: a checkpoint before it was used instead")
        return self.location(name)

    def remove(self, name: str) -> None:
        """Remove a directory; after an interruption, its remains are ignored. Called by one rank."""
        with as_os_error():
            remove_directory(self.files, self.path(name))


def _named(owner: dict[str, Any]) -> str:
    return f"process {owner['process']} on {owner['host']}" if owner else "unknown; its owner.json is gone"
