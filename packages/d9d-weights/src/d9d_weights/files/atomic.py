"""Atomic writes: files and directories that are complete or absent, also after a crash and on network file systems.

Everything is written under a name beside its own, synced, renamed within its directory; then the directory is synced.
That is all that is asked of the file system, and NFS gives it: other clients may see a file later, but never half of a
renamed one, and ``fsync`` reports a full disk that ``write`` did not. No file is linked; none is a lock by existing.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

__all__ = ["move", "sync_tree"]

_OLD = ".old.tmp"


def sync(path: Path) -> None:
    """Have the operating system write a file or directory to the disk, so that it survives a crash."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync a directory: they change it before they answer.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def sync_tree(directory: Path) -> None:
    """Sync a directory and everything in it."""
    for path in directory.rglob("*"):
        if not path.is_symlink():
            sync(path)
    sync(directory)


def move(source: Path, target: Path) -> None:
    """Rename what is synced, within a directory, and sync the directory. A file replaces another one."""
    _rename(source, target)
    sync(target.parent)


def _rename(source: Path, target: Path) -> None:
    before = source.lstat()
    try:
        source.rename(target)
    except FileNotFoundError:
        # NFS repeats a request whose answer was lost, and reports that the repeated one found nothing to rename.
        try:
            after = target.lstat()
        except FileNotFoundError:
            after = None
        if after is None or (after.st_dev, after.st_ino) != (before.st_dev, before.st_ino):
            raise


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file in one step. NaN and infinity are refused: they are no JSON."""
    write_text(path, json_bytes(value).decode())


def json_bytes(value: Any) -> bytes:
    """Serialise a value as a JSON file. NaN and infinity are refused: they are no JSON.

    Raises:
        TypeError: the value is nothing that JSON can hold.
        ValueError: it holds NaN or infinity.
    """
    return (json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


def write_text(path: Path, text: str) -> None:
    """Replace a small file in one step."""
    with replacing(path) as temporary:
        create(temporary, text.encode())


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Replace a file atomically, in one step when the block ends; if the block raises, nothing is changed.

    One process at a time may do so.

    Args:
        path: of the file, which need not exist.

    Yields:
        the name under which to write it; nothing has that name.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        yield temporary
        sync(temporary)
        move(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def create(path: Path, content: bytes) -> None:
    """Write a file of a name that is nobody else's; what has it is removed, and a link is not followed."""
    path.unlink(missing_ok=True)
    with path.open("xb") as file:
        file.write(content)


def clear(path: Path) -> None:
    """Remove a directory, or whatever else has its name, as far as that can be; a link is not followed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def replace(target: Path, new: Path) -> None:
    """Rename a directory, replacing another one if there is one; if that fails, the other one stays."""
    # A directory cannot be renamed over another one, so for a moment the old one has a name of its own.
    old = target.with_name(f".{target.name}{_OLD}")
    clear(old)
    if target.exists():
        _rename(target, old)
    try:
        _rename(new, target)
    except BaseException:
        if old.exists():
            _rename(old, target)
        raise
    sync(target.parent)
    clear(old)


def remove_leftovers(directory: Path) -> None:
    """Clear up after a killed process: put back what it was replacing, remove what it left half-written."""
    for old in directory.glob(f".*{_OLD}"):
        target = directory / old.name[1 : -len(_OLD)]
        if not target.exists():
            _rename(old, target)
    for path in directory.glob(".*.tmp"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
