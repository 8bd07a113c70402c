"""Atomic writes: files and directories are complete or absent, also after a crash and on network file systems.

Data is written under a temporary name in the same directory, synced and renamed; then the directory is synced. NFS
supports these operations: other clients may see a renamed file late, but never incomplete, and ``fsync`` reports a full
disk that ``write`` did not report. The functions need no hard links and use no lock files.
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
    """Flush a file or directory to disk, so that it survives a crash."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync a directory: they apply changes before they reply.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def sync_tree(directory: Path) -> None:
    """Sync a directory and all its files and directories."""
    for path in directory.rglob("*"):
        if not path.is_symlink():
            sync(path)
    sync(directory)


def move(source: Path, target: Path) -> None:
    """Rename a synced file or directory within its parent, and sync the parent. A file may replace a file."""
    _rename(source, target)
    sync(target.parent)


def _rename(source: Path, target: Path) -> None:
    before = source.lstat()
    try:
        source.rename(target)
    except FileNotFoundError:
        # NFS repeats a request whose reply was lost, and reports that the repeated one found no source.
        try:
            after = target.lstat()
        except FileNotFoundError:
            after = None
        if after is None or (after.st_dev, after.st_ino) != (before.st_dev, before.st_ino):
            raise


def write_json(path: Path, value: Any, writer: str = "") -> None:
    """Replace a JSON file atomically. NaN and infinity are refused, because they are not JSON.

    Args:
        path: path of the file.
        value: JSON value.
        writer: see :func:`replacing`.
    """
    write_text(path, json_bytes(value).decode(), writer)


def json_bytes(value: Any) -> bytes:
    """Serialise a value as a JSON file. NaN and infinity are refused, because they are not JSON.

    Raises:
        TypeError: the value is not a JSON value.
        ValueError: the value contains NaN or infinity.
    """
    return (json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


def write_text(path: Path, text: str, writer: str = "") -> None:
    """Replace a small file atomically; see :func:`replacing` for ``writer``."""
    with replacing(path, writer) as temporary:
        create(temporary, text.encode())


@contextmanager
def replacing(path: Path, writer: str = "") -> Iterator[Path]:
    """Replace a file atomically at the end of the block; if the block raises, the file does not change.

    Args:
        path: path of the file, which need not exist.
        writer: name of this process, if several processes may replace the file at the same time: writers with the same
            name would remove each other's temporary file, and no file would be written.

    Yields:
        Temporary path to write; no file exists there.
    """
    temporary = path.with_name(f".{path.name}{f'.{writer}' if writer else ''}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        yield temporary
        sync(temporary)
        move(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def create(path: Path, content: bytes) -> None:
    """Write a new file: an existing file or link of its name is removed first, so that no link is followed."""
    path.unlink(missing_ok=True)
    with path.open("xb") as file:
        file.write(content)


def clear(path: Path) -> None:
    """Remove a directory or file and ignore errors; links are not followed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def replace(target: Path, new: Path) -> None:
    """Rename a directory and replace an existing directory, which stays if the rename fails."""
    # A directory cannot be renamed over another one, so the old one is renamed first.
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
    """Clean up after a killed process: restore directories that it was replacing, remove its drafts and probe files."""
    for old in directory.glob(f".*{_OLD}"):
        target = directory / old.name[1 : -len(_OLD)]
        if not target.exists():
            _rename(old, target)
    for path in directory.glob(".*.tmp"):
        if path.is_dir() or path.name.startswith(".probe-"):
            clear(path)
