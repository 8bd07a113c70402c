"""Directory of unfinished work beside an entry of the cache: one process works, others wait, the next goes on."""

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
    """Work directory of a corpus: finished parts of ``root/key``, held by one process of this machine at a time.

    Where files cannot be locked, each process has a directory of its own, and nothing goes on after a kill.

    Args:
        root: directory of the cache; made if absent.
        key: identifies the content.
        keep: whether the directory stays if the block raises; it always stays if the process is killed, and goes a day
            after it was last used.
        note: told about waiting.

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
        if remove:  # NFS keeps a file that is open, and with it its directory
            with suppress(OSError):
                directory.rmdir()


def _hold(directory: Path, note: Callable[[str], None]) -> tuple[Path, int | None]:
    """Make a directory and lock it; return it and the descriptor that holds the lock."""
    file = directory / _LOCK
    while True:
        directory.mkdir(exist_ok=True)
        try:
            lock = lock_file(file, lambda: note("waiting for another process, which prepares the same data"))
        except FileNotFoundError:
            continue  # whoever held it is done
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
        os.utime(directory)  # so that it is not taken for an abandoned one
        return directory, lock
