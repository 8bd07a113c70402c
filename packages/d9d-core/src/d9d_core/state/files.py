"""Files that are there whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_CHUNK = 1 << 22


def sha256(path: Path) -> str:
    """Hexadecimal checksum of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def sync(path: Path) -> None:
    """Have the operating system write a file or directory to the disk, so that it survives a crash."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any) -> None:
    """Write JSON that ends up on the disk. NaN and infinity are refused: they are no JSON."""
    path.write_text(json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n", "utf-8")
    sync(path)


def write_text(path: Path, text: str) -> None:
    """Replace a small file in one step."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, "utf-8")
    sync(temporary)
    temporary.replace(path)


@contextmanager
def published(target: Path) -> Iterator[Path]:
    """A temporary directory that becomes ``target`` by one rename when the block succeeds.

    An existing ``target`` is replaced. If the block fails, nothing remains; if the process dies, a ``.tmp`` directory
    remains, which :func:`remove_leftovers` removes.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        sync(temporary)
        old = target.with_name(f".{target.name}.old.tmp")
        shutil.rmtree(old, ignore_errors=True)
        if target.exists():
            target.rename(old)
        temporary.rename(target)
        sync(target.parent)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def remove_leftovers(directory: Path) -> None:
    """Remove what a killed process left half-written in ``directory``."""
    for path in directory.glob(".*.tmp"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
