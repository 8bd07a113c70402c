"""Atomic writes: files and directories that are complete or absent."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from d9d_core.errors import CheckpointError

_OLD = ".old.tmp"


def sync(path: Path) -> None:
    """Have the operating system write a file or directory to the disk, so that it survives a crash."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
    temporary = path.with_name(f".{path.name}.tmp")
    create(temporary, text.encode())
    sync(temporary)
    temporary.replace(path)


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
        target.rename(old)
    try:
        new.rename(target)
    except BaseException:
        if old.exists():
            old.rename(target)
        raise
    sync(target.parent)
    clear(old)


def remove_leftovers(directory: Path) -> None:
    """Clear up after a killed process: put back what it was replacing, remove what it left half-written."""
    for old in directory.glob(f".*{_OLD}"):
        target = directory / old.name[1 : -len(_OLD)]
        if not target.exists():
            old.rename(target)
    for path in directory.glob(".*.tmp"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def exclusive(path: Path, busy: str) -> Iterator[None]:
    """Hold a lock file while the block runs; the lock goes with the process, however it ends.

    Raises:
        CheckpointError: another process holds it; the text is ``busy`` and that process's number. Or its name is that
            of a link, which would have another file overwritten.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if path.is_symlink():
            raise CheckpointError(f"{path} is a link, and must be a file of its own: remove it") from error
        raise
    with open(descriptor, "r+") as file:  # noqa: PTH123 - a descriptor
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode) or facts.st_nlink > 1:
            raise CheckpointError(f"{path} is a link or no file, and must be a file of its own: remove it")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(f"{busy} (process {file.read(20).strip()})") from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
