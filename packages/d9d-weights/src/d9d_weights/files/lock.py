"""File locks between processes of one or several machines; a lock goes with its process, however that ends.

A lock is ``flock`` on a file of its own; the file stays, and tells who holds it. Linux passes ``flock`` on NFS to the
server (since 2.6.12, for files open for writing), so it holds between machines, and the server frees it when a client
is gone. Mounts with ``nolock`` or ``local_lock=flock`` lock within one machine only, and no program can tell.

The library filelock, which torch brings along, is no better here: its lock on Unix is the same ``flock`` without the
holder's name, and where that is missing, it takes the existence of a file for a lock, which stays after a ``kill -9``
on another machine, so that a resumed run would wait for ever (docs/notes.md).
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

#: What file systems without locks answer; NFS without its lock service: ENOLCK; Lustre without ``-o flock``: ENOSYS.
_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL}
#: What they answer if somebody else has the lock.
_HELD = {errno.EAGAIN, errno.EACCES}
#: Attempts and seconds between them: whoever asks whether a lock is held has it for an instant.
_ATTEMPTS, _PAUSE = 4, 0.05
#: Most bytes of a name in a lock file.
_NAME = 200


class LocksUnsupportedError(OSError):
    """Error of a file system that locks no files."""


@contextmanager
def exclusive(path: Path, busy: str, note: Callable[[str], None] | None = None) -> Iterator[None]:
    """Hold a lock file while the block runs.

    Where the file system locks no files, the block runs all the same, after a warning: a second process is not noticed.

    Args:
        path: of the lock file.
        busy: text of the error if another process holds it.
        note: told about a file system without locks; standard error by default.

    Raises:
        CheckpointError: another process holds it; the text is ``busy`` and that process's number and host. Or its name
            is that of a link, which would have another file overwritten.
    """
    descriptor = None
    try:
        descriptor = lock_file(path)
    except LocksUnsupportedError as error:
        (note or _warn)(
            f"{path.parent}: this file system locks no files ({error.strerror}); nothing keeps a second process from "
            "writing here"
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
    """Lock a file, which is made if it is absent.

    Args:
        path: of the file.
        waiting: called before this waits for another process; without it, nothing is waited for.

    Returns:
        its descriptor; closing it, or the end of the process, frees the lock.

    Raises:
        BlockingIOError: another process has it, and nothing is waited for.
        LocksUnsupportedError: the file system locks no files.
        CheckpointError: the name is that of a link or of no file.
        FileNotFoundError: its directory is absent.
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
        os.close(descriptor)  # it was removed while this process waited


def is_held(path: Path) -> bool:
    """Whether a process has a lock file. A process of another machine is noticed where locks hold between machines."""
    try:
        name = _text(path).split()
        number, host = int(name[0]), name[1] if len(name) > 1 else socket.gethostname()
        if host == socket.gethostname():
            os.kill(number, 0)
    except PermissionError:  # a process of another user
        pass
    except (OSError, ValueError, IndexError, OverflowError):  # nobody is named, or nobody has that number any more
        return False
    # The number may be that of another process by now.
    with suppress(OSError), os.fdopen(open_regular(path, "none"), "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno in _HELD
    return False


def _open(path: Path) -> int:
    # NFS locks only what is open for writing. Nobody is waited for while opening, as at a pipe.
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if path.is_symlink():
            raise CheckpointError(f"{path} is a link, and must be a file of its own: remove it") from error
        raise
    facts = os.fstat(descriptor)
    if not stat.S_ISREG(facts.st_mode) or facts.st_nlink > 1:
        os.close(descriptor)
        raise CheckpointError(f"{path} is a link or no file, and must be a file of its own: remove it")
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
    """Whether the file still has its name: who removes its own lock file leaves those that wait with a nameless one."""
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
    return "its process is not known"


def _text(path: Path) -> str:
    """Text of a lock file, which is short; a link or a pipe of that name is none."""
    return read_regular(path, _NAME, "none").decode("utf-8", "replace")


def _warn(text: str) -> None:
    with suppress(OSError):
        print(visible(f"warning: {text}"), file=sys.stderr, flush=True)  # noqa: T201 - the lock has no other way to say it
