"""Directory of unfinished work next to an entry of the cache: one process works on the entry, other processes wait."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from d9d_core.errors import DataError
from d9d_weights.files.lock import LocksUnsupportedError, lock_file

_LOCK = "lock"


@contextmanager
def work_directory(root: Path, key: str, keep: bool, note: Callable[[str], None]) -> Iterator[Path]:
    """Work directory of a corpus: finished shards of ``root/key``, locked by one process at a time.

    On file systems without locks, each process has its own directory, and the work of a killed process is lost.

    Args:
        root: directory of the cache; created if missing.
        key: identifier of the content.
        keep: whether the directory stays if the ``with`` block raises. It always stays if the process is killed; a
            later start removes it a day after its last use.
        note: function that prints a line if this process waits for another process or cannot lock files.

    Raises:
        DataError: ``root`` cannot be written.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        directory, lock = _hold(root / f"{key}.tmp-work", note)
    except OSError as error:
        raise DataError(
            f"cannot prepare data in the cache directory {root}: {error}; "
            "make it writable, free space, or choose another cache directory"
        ) from error
    remove = True
    try:
        yield directory
    except BaseException:
        remove = not keep or lock is None
        raise
    finally:
        if remove:
            shutil.rmtree(directory, ignore_errors=True)
        if lock is not None:
            os.close(lock)
        if remove:  # while a file is open, NFS keeps the file and its directory
            with suppress(OSError):
                directory.rmdir()


def _hold(directory: Path, note: Callable[[str], None]) -> tuple[Path, int | None]:
    """Make a directory and lock it; return it and the file descriptor of the lock.

    On a file system without locks, make and return a directory that only this process uses, and ``None``.
    """
    file = directory / _LOCK
    while True:
        directory.mkdir(exist_ok=True)
        try:
            lock = lock_file(file, lambda: note("waiting for another process, which prepares the same data"))
        except FileNotFoundError:
            continue  # the process that held the lock has finished, and removed the directory
        except LocksUnsupportedError as error:
            note(
                f"files in {directory.parent} cannot be locked ({error.strerror}): processes that prepare the same "
                "data do not wait for each other"
            )
            with suppress(OSError):
                file.unlink()
                directory.rmdir()
            own = directory.with_name(f"{directory.name}-{os.getpid()}-{secrets.token_hex(4)}")
            own.mkdir()
            return own, None
        os.utime(directory)  # a recent time keeps it from being removed as abandoned
        return directory, lock
