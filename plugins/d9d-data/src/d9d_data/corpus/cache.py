"""Cache of prepared data on disk; an entry is complete or absent.

A directory is built under another name and renamed. Its manifest, written last, holds a checksum of every file. So a
killed process leaves nothing that looks finished, two processes can build the same thing at once, and damage is found
and repaired.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Collection
from pathlib import Path, PurePath

from d9d_core.extend import DataError, parse_json, read_regular

MANIFEST = "manifest.json"
_ABANDONED_AFTER = 24 * 3600  # seconds


def cached_directory(
    root: Path, key: str, build: Callable[[Path], None], note: Callable[[str], None], files: Collection[str] = ()
) -> Path:
    """Directory ``root/key`` of the cache, built if it is absent or damaged.

    Args:
        root: directory of the cache; made if absent.
        key: identifies the content.
        build: fills an empty directory.
        note: told about damage.
        files: names that it must have.

    Raises:
        DataError: ``root`` cannot be written.
    """
    target = root / key
    problem = find_damage(target, files)
    if problem is None:
        return target
    if target.exists():
        note(f"prepared data in {target} is damaged ({problem}); preparing it again")
    try:
        root.mkdir(parents=True, exist_ok=True)
        _sweep(root)
        temporary = root / f"{key}.tmp-{os.getpid()}-{secrets.token_hex(4)}"
        temporary.mkdir()
        try:
            build(temporary)
            _write_manifest(temporary)
            _publish(temporary, target, files)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise DataError(
            f"cannot prepare data in the cache directory {root}: {error}; "
            "make it writable, free space, or choose another cache directory"
        ) from error
    return target


def file_digests(directory: Path) -> dict[str, str]:
    """SHA-256 of each file, by name, from the manifest of a cached directory.

    Raises:
        OSError: the manifest cannot be read.
        ValueError: it is no such table, or names what is not in the directory.
    """
    manifest = parse_json(read_regular(directory / MANIFEST), strict=True)
    if not isinstance(manifest, dict) or not all(isinstance(digest, str) for digest in manifest.values()):
        raise ValueError(f"{MANIFEST} is no table of checksums")
    for name in manifest:
        if not name or PurePath(name).is_absolute() or ".." in PurePath(name).parts or "\0" in name:
            raise ValueError(f"{MANIFEST} names {name[:80]!r}, which is no file of it")
        if not (directory / name).is_file():
            raise FileNotFoundError(errno.ENOENT, "it is not there, or no regular file", name)
    return manifest


def find_damage(directory: Path, files: Collection[str] = ()) -> str | None:
    """Damage of a cached directory, which has these files among others, in words, or ``None``."""
    try:
        digests = file_digests(directory)
        if lacking := sorted(set(files) - digests.keys()):
            return f"{MANIFEST} lacks {', '.join(lacking)}"
        for name, digest in digests.items():
            if _sha256(directory / name) != digest:
                return f"{name} has another checksum than when it was written"
    except (OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _write_manifest(directory: Path) -> None:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    digests = {path.relative_to(directory).as_posix(): _sha256(path) for path in files}
    (directory / MANIFEST).write_text(json.dumps(digests, indent=2), encoding="utf-8")


def _publish(temporary: Path, target: Path, files: Collection[str]) -> None:
    for _ in range(10):
        try:
            temporary.rename(target)
        except OSError:
            if not target.exists():
                raise
        else:
            return
        try:
            seen = target.stat().st_ino
            if find_damage(target, files) is None:
                return  # another process was first; both built the same
            if target.stat().st_ino != seen:
                continue  # another process repaired it during the check
            # Renamed away rather than deleted in place, so that nobody sees half of it.
            away = target.with_name(f"{target.name}.tmp-bad-{secrets.token_hex(4)}")
            target.rename(away)
        except FileNotFoundError:
            continue  # another process renamed it away
        shutil.rmtree(away, ignore_errors=True)
    raise OSError(f"{target} keeps changing; is another process writing to it?")


def _sweep(root: Path) -> None:
    """Remove the directories that killed processes left behind."""
    for path in root.glob("*.tmp-*"):
        try:
            if time.time() - path.stat().st_mtime > _ABANDONED_AFTER:
                shutil.rmtree(path, ignore_errors=True)
        except FileNotFoundError:
            continue  # its owner finished just now


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
