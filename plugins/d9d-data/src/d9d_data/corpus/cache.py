"""Cache of prepared data on disk; an entry is complete or absent.

An entry is built in a directory with a temporary name, which is then renamed. The manifest, written last, holds size
and checksums of every file. A killed process therefore leaves no entry that looks complete, two processes can build the
same entry at once, and damaged entries are detected and built again. By default, a check for damage reads only a sample
of fixed size of each file.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path, PurePath

from d9d_core.errors import DataError
from d9d_core.untrusted import parse_json, read_regular
from d9d_weights.files.atomic import move, sync_tree

MANIFEST = "manifest.json"
#: Bytes per block of a file's sample, and number of blocks: the first, the last, and others at equal distances.
SAMPLE_BLOCK, SAMPLE_BLOCKS = 1 << 14, 6
_ABANDONED_AFTER = 24 * 3600  # seconds


def cached_directory(
    root: Path,
    key: str,
    build: Callable[[Path], None],
    note: Callable[[str], None],
    files: Collection[str] = (),
    full: bool = False,
) -> Path:
    """Directory ``root/key`` of the corpus cache; built if it is missing or damaged.

    Args:
        root: directory of the cache; created if missing.
        key: identifier of the content.
        build: function that fills an empty directory.
        note: function that prints a line about damage.
        files: names of files that the entry must have.
        full: check all bytes for damage, not only a sample.

    Raises:
        DataError: ``root`` cannot be written.
    """
    target = root / key
    problem = find_damage(target, files, full)
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
            sync_tree(temporary)
            _publish(temporary, target, files, full)
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
        OSError: the manifest cannot be read, or a file that it names is missing.
        ValueError: the manifest is malformed, or names a path outside the directory.
    """
    return {name: written.sha256 for name, written in _read_manifest(directory).items()}


@dataclass(frozen=True, slots=True)
class _Written:
    """Size of a file as written, and the SHA-256 checksums of the whole file and of its sample."""

    size: int
    sha256: str
    sample: str


def _read_manifest(directory: Path) -> dict[str, _Written]:
    manifest = parse_json(read_regular(directory / MANIFEST), strict=True)
    kinds = {"size": int, "sha256": str, "sample": str}
    if not isinstance(manifest, dict) or not all(
        isinstance(entry, dict) and {key: type(value) for key, value in entry.items()} == kinds
        for entry in manifest.values()
    ):
        raise ValueError(f"{MANIFEST} of the prepared data is not a table of sizes and checksums")
    for name in manifest:
        if not name or PurePath(name).is_absolute() or ".." in PurePath(name).parts or "\0" in name:
            raise ValueError(
                f"{MANIFEST} of the prepared data names {name[:80]!r}, which is not a file in its directory"
            )
        if not (directory / name).is_file():
            raise FileNotFoundError(errno.ENOENT, "missing, or not a regular file", name)
    return {name: _Written(**entry) for name, entry in manifest.items()}


def find_damage(directory: Path, files: Collection[str] = (), full: bool = False) -> str | None:
    """Describe the damage of a directory of the corpus cache; ``None`` if no damage is found.

    Args:
        directory: entry of the cache.
        files: names of files that the entry must have.
        full: check all bytes. Otherwise only the size and a sample of each file are compared, so damage outside of the
            sample that keeps the size is not found.
    """
    try:
        manifest = _read_manifest(directory)
        if lacking := sorted(set(files) - manifest.keys()):
            return f"{MANIFEST} lacks {', '.join(lacking)}"
        for name, written in manifest.items():
            if (size := (directory / name).stat().st_size) != written.size:
                return f"{name} has {size:,} bytes, not the {written.size:,} that were written"
            if _sample(directory / name) != written.sample or (full and _sha256(directory / name) != written.sha256):
                return f"{name} has a different checksum than when it was written"
    except (OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _write_manifest(directory: Path) -> None:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    table = {
        path.relative_to(directory).as_posix(): {
            "size": path.stat().st_size,
            "sha256": _sha256(path),
            "sample": _sample(path),
        }
        for path in files
    }
    (directory / MANIFEST).write_text(json.dumps(table, indent=2), encoding="utf-8")


def _publish(temporary: Path, target: Path, files: Collection[str], full: bool) -> None:
    for _ in range(10):
        try:
            move(temporary, target)
        except OSError as error:
            if not target.exists():
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
                continue  # the target existed until another process renamed it, to repair it
        else:
            return
        try:
            seen = target.stat().st_ino
            if find_damage(target, files, full) is None:
                return  # another process published the same content first
            if target.stat().st_ino != seen:
                continue  # another process repaired it during the check
            # Rename the damaged entry before it is deleted, so that no process sees half of it.
            away = target.with_name(f"{target.name}.tmp-bad-{secrets.token_hex(4)}")
            move(target, away)
        except FileNotFoundError:
            continue  # another process renamed it away
        shutil.rmtree(away, ignore_errors=True)
    raise OSError(f"{target} keeps changing; stop other processes that write there, or choose another cache directory")


def _sweep(root: Path) -> None:
    """Remove temporary directories that have not changed for a day: their processes were most likely killed."""
    abandoned = list(root.glob("*.tmp-*"))
    if not abandoned:
        return
    # Compute ages by the file system's clock, read from a new file: other machines may write these directories on a
    # shared file system, and this machine's clock may be ahead.
    with tempfile.NamedTemporaryFile(dir=root, prefix=".clock-") as new:
        now = os.fstat(new.fileno()).st_mtime
    for path in abandoned:
        try:
            if now - path.stat().st_mtime > _ABANDONED_AFTER:
                shutil.rmtree(path, ignore_errors=True)
        except FileNotFoundError:
            continue  # its owner finished just now


def sample_begins(size: int) -> list[int]:
    """Position of the first byte of each block in the sample of a file whose ``size`` exceeds the sample's."""
    return [(size - SAMPLE_BLOCK) * number // (SAMPLE_BLOCKS - 1) for number in range(SAMPLE_BLOCKS)]


def _sample(path: Path) -> str:
    """SHA-256 of a file's sample; a file no larger than a sample is hashed as a whole."""
    size, digest = path.stat().st_size, hashlib.sha256()
    with path.open("rb") as file:
        if size <= SAMPLE_BLOCK * SAMPLE_BLOCKS:
            digest.update(file.read())
            return digest.hexdigest()
        for begin in sample_begins(size):
            file.seek(begin)
            digest.update(file.read(SAMPLE_BLOCK))
    return digest.hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
