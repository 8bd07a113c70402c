"""Folders behind an fsspec address, such as an object store: no rename, no lock; the manifest makes a folder exist."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, cast

from d9d_core.errors import CheckpointError
from fsspec.core import url_to_fs  # type: ignore[import-untyped]

from d9d_weights.files.storage import MANIFEST

_OWNER = "owner.json"
#: In a folder that was set aside: an object store cannot rename gigabytes.
_DAMAGED = "damaged"


class RemoteStorage:
    """A prefix of an object store, or any other place that fsspec reaches.

    Nobody can lock such a place. So whoever opens it last owns it, by a file with a random token, and whoever opened it
    before is told so before anything of theirs appears.

    Args:
        url: such as ``s3://bucket/run/checkpoints`` or ``memory://run``.

    Raises:
        ImportError: the driver is not installed.
        ValueError: there is no such kind of address.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.files, self._root = url_to_fs(self.url)
        self._me: dict[str, Any] | None = None

    def __str__(self) -> str:
        return self.url

    def path(self, *parts: str) -> str:
        """As the file system wants it."""
        return "/".join((self._root.rstrip("/"), *parts))

    def prepare(self) -> None:
        """See :class:`~d9d_weights.files.storage.Storage`."""
        with _as_os_errors():
            self.files.makedirs(self.path(), exist_ok=True)
            self.files.pipe_file(self.path("probe"), b"probe")
            self.files.rm_file(self.path("probe"))

    def is_visible(self) -> bool:
        """See :class:`~d9d_weights.files.storage.Storage`. Object stores have no directories that could be seen."""
        return True

    @contextmanager
    def owned(self) -> Iterator[None]:
        """See :class:`~d9d_weights.files.storage.Storage`."""
        self._me = {"token": secrets.token_hex(8), "host": platform.node(), "process": os.getpid()}
        with _as_os_errors():
            self.files.pipe_file(self.path(_OWNER), json.dumps(self._me).encode())
        try:
            yield
        finally:
            with contextlib.suppress(Exception):  # it may be gone, or somebody else's
                self.check_owner()
                self.files.rm_file(self.path(_OWNER))
            self._me = None

    def check_owner(self) -> None:
        """Make sure that nobody else opened the place after this process did.

        Raises:
            CheckpointError: somebody did.
        """
        if self._me is None:
            return
        try:
            owner = json.loads(self.files.cat_file(self.path(_OWNER)))
        except FileNotFoundError:
            owner = {}
        if owner.get("token") != self._me["token"]:
            raise CheckpointError(
                f"{self.url} was taken over by another training run ({_named(owner)}); this one is "
                f"{_named(self._me)}: stop one of them, or give it another run.name"
            )

    def names(self) -> list[str]:
        """See :class:`~d9d_weights.files.storage.Storage`."""
        with _as_os_errors():
            self.files.invalidate_cache()
            try:
                found = self.files.ls(self.path(), detail=True)
            except FileNotFoundError:
                return []
            names = [entry["name"].rstrip("/").rpartition("/")[2] for entry in found if entry["type"] == "directory"]
            return [name for name in names if not self.files.exists(self.path(name, _DAMAGED))]

    def location(self, name: str) -> str:
        """See :class:`~d9d_weights.files.storage.Storage`."""
        return f"{self.url}/{name}"

    def draft(self, name: str) -> RemoteDraft:
        """See :class:`~d9d_weights.files.storage.Storage`."""
        return RemoteDraft(self, name)

    def open(self, name: str, file: str) -> BinaryIO:
        """See :class:`~d9d_weights.files.storage.Storage`."""
        with _as_os_errors():
            # Windows are read once, so reading ahead would fetch bytes that belong to other ranks.
            return cast("BinaryIO", self.files.open(self.path(name, file), "rb", cache_type="none"))

    def set_aside(self, name: str) -> str:
        """See :class:`~d9d_weights.files.storage.Storage`."""
        with _as_os_errors():
            self.files.pipe_file(self.path(name, _DAMAGED), b"set aside: a checkpoint before it was used instead")
        return self.location(name)

    def remove(self, name: str) -> None:
        """See :class:`~d9d_weights.files.storage.Storage`."""
        with _as_os_errors():
            # Whatever remains does not count: a folder that was set aside.
            self.set_aside(name)
            self.files.rm(self.path(name), recursive=True)


class RemoteDraft:
    """Files that mean nothing until the manifest is there.

    Args:
        storage: whose owner is checked.
        name: of the folder.
    """

    def __init__(self, storage: RemoteStorage, name: str) -> None:
        self._storage = storage
        self._name = name

    def start(self) -> None:
        """See :class:`~d9d_weights.files.storage.Draft`."""
        self._storage.check_owner()
        with _as_os_errors():
            self._storage.files.invalidate_cache()
            if self._storage.files.exists(self._path()):
                self._storage.remove(self._name)
            self._storage.files.makedirs(self._path(), exist_ok=True)

    @contextmanager
    def create(self, file: str) -> Iterator[BinaryIO]:
        """See :class:`~d9d_weights.files.storage.Draft`."""
        with _as_os_errors(), self._storage.files.open(self._path(file), "wb") as out:
            yield out

    def size(self, file: str) -> int | None:
        """See :class:`~d9d_weights.files.storage.Draft`."""
        with _as_os_errors():
            self._storage.files.invalidate_cache()
            try:
                return int(self._storage.files.size(self._path(file)))
            except FileNotFoundError:
                return None

    def publish(self, manifest: bytes) -> None:
        """See :class:`~d9d_weights.files.storage.Draft`."""
        self._storage.check_owner()
        with _as_os_errors():
            self._storage.files.pipe_file(self._path(MANIFEST), manifest)

    def discard(self) -> None:
        """See :class:`~d9d_weights.files.storage.Draft`."""
        with contextlib.suppress(Exception):
            self._storage.check_owner()  # else it may be the new owner's
            self._storage.remove(self._name)

    def _path(self, *file: str) -> str:
        return self._storage.path(self._name, *file)


@contextmanager
def _as_os_errors() -> Iterator[None]:
    """Drivers raise whatever their client library raises."""
    try:
        yield
    except (OSError, CheckpointError):
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


def _named(owner: dict[str, Any]) -> str:
    return f"process {owner['process']} on {owner['host']}" if owner else "unknown; its owner.json is gone"
