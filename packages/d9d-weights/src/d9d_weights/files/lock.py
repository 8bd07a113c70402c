"""File locks between processes of one or several machines; a lock ends with its process.

A lock is ``flock`` on a separate file; the file remains and names the holder. Linux forwards ``flock`` on NFS to the
server (since 2.6.12, for files open for writing), so the lock holds between machines, and the server releases it when
a client is gone. Mounts with ``nolock`` or ``local_lock=flock`` lock within one machine only; no program can detect
this.

The library filelock, a dependency of torch, has no advantage: its lock on Unix is the same ``flock`` without the
holder's name. Without ``flock`` it uses the existence of a file as a lock, which remains after a ``kill -9`` on another
machine, so that a resumed run would wait for ever (docs/notes.md).
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from d9d_core.errors import CheckpointError
from d9d_core.untrusted import open_regular, read_regular, visible

__all__ = ["LocksUnsupportedError", "lock_file"]

#: Errors of file systems without locks. NFS without its lock service: ENOLCK; Lustre without ``-o flock``: ENOSYS.
_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL}
#: Errors if another process has the lock.
_HELD = {errno.EAGAIN, errno.EACCES}
#: Number of attempts to take a lock, and seconds between them. A first attempt may fail although no process holds the
#: lock for long, because :func:`is_held` of another process takes it for an instant.
_ATTEMPTS, _PAUSE = 4, 0.05
#: Limit of the bytes read from a lock file, which names the process and host that hold the lock.
_NAME = 200


class LocksUnsupportedError(OSError):
    """The file system does not support locks."""


@contextmanager
def exclusive(path: Path, busy: str, note: Callable[[str], None] | None = None) -> Iterator[None]:
    """Hold a lock file inside the block.

    On a file system without locks, the block runs after a warning; a second process is then not detected.

    Args:
        path: path of the lock file.
        busy: error text if another process has the lock.
        note: function that prints the warning; standard error by default.

    Raises:
        CheckpointError: another process has the lock; the text is ``busy`` and the process's number and host. Also
            raised if the path is a link, because writing through the link would overwrite another file.
    """
    descriptor = None
    try:
        descriptor = lock_file(path)
    except LocksUnsupportedError as error:
        (note or _warn)(
            f"{path.parent}: this file system does not support locks ({error.strerror}); a second process that writes "
            "here is not detected"
        )
    except BlockingIOError:
        raise CheckpointError(f"{busy} ({_holder(path)})") from None
    try:
        if descriptor is not None:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n{socket.gethostname()}\n".encode(), 0)
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def lock_file(path: Path, waiting: Callable[[], None] | None = None) -> int:
    """Lock a file, and create it if it is absent.

    Args:
        path: path of the file.
        waiting: called before this function waits for another process; if ``None``, the function does not wait.

    Returns:
        Descriptor of the file. Closing it, or the end of the process, releases the lock.

    Raises:
        BlockingIOError: another process has the lock, and ``waiting`` is ``None``.
        LocksUnsupportedError: the file system does not support locks.
        CheckpointError: the path is a link or not a regular file.
        FileNotFoundError: the directory is absent.
    """
    while True:
        descriptor = _open(path)
        try:
            _take(descriptor, path, waiting)
            named = _is_named(descriptor, path)
        except BaseException:
            os.close(descriptor)
            raise
        if named:
            return descriptor
        os.close(descriptor)  # the file was removed while this process waited


def is_held(path: Path) -> bool:
    """Whether a process has locked this file; processes of other machines are seen if locks work between machines."""
    try:
        name = _text(path).split()
        number, host = int(name[0]), name[1] if len(name) > 1 else socket.gethostname()
        if host == socket.gethostname():
            os.kill(number, 0)
    except PermissionError:  # a process of another user
        pass
    except (OSError, ValueError, IndexError, OverflowError):  # no holder is named, or the process has ended
        return False
    # The holder's process number may have been reused, so look whether the file is locked.
    with suppress(OSError), os.fdopen(open_regular(path, "none"), "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno in _HELD
    return False


def _open(path: Path) -> int:
    # O_RDWR, because NFS locks only files open for writing; O_NONBLOCK, because opening a pipe would wait.
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if path.is_symlink():
            raise CheckpointError(f"the lock file {path} is a symbolic link, not a regular file; remove it") from error
        raise
    facts = os.fstat(descriptor)
    if not stat.S_ISREG(facts.st_mode) or facts.st_nlink > 1:
        os.close(descriptor)
        raise CheckpointError(f"the lock file {path} is a link or not a regular file; remove it")
    return descriptor


def _take(descriptor: int, path: Path, waiting: Callable[[], None] | None) -> None:
    try:
        for attempt in range(_ATTEMPTS):
            if attempt:
                time.sleep(_PAUSE)
            try:
                return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in _HELD:
                    raise
        if waiting is not None:
            waiting()
            return fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            raise LocksUnsupportedError(error.errno, error.strerror, str(path)) from error
        raise
    raise BlockingIOError(errno.EAGAIN, "another process has the lock", str(path))


def _is_named(descriptor: int, path: Path) -> bool:
    """Whether the path still names the file of the descriptor, which may be removed while this process waits."""
    try:
        named = path.lstat()
    except FileNotFoundError:
        return False
    mine = os.fstat(descriptor)
    return (named.st_dev, named.st_ino) == (mine.st_dev, mine.st_ino)


def _holder(path: Path) -> str:
    with suppress(OSError):
        number, _, host = _text(path).strip().partition("\n")
        if number.isdecimal():
            return f"process {number}" + (f" on {host}" if host and host != socket.gethostname() else "")
    return "its process is unknown"


def _text(path: Path) -> str:
    """Read the short text of a lock file; raises an error if the path is a link or a pipe."""
    return read_regular(path, _NAME, "none").decode("utf-8", "replace")


def _warn(text: str) -> None:
    with suppress(OSError):
        print(visible(f"warning: {text}"), file=sys.stderr, flush=True)  # noqa: T201 - no logger is available here
