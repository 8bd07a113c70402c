"""Keeps write failures of standard output and error (closed pipe, full disk) from ending a run."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO, cast

#: Errors after which the reader or terminal is gone for good. After other errors (a full disk), a write may succeed.
_GONE = {errno.EPIPE, errno.EIO, errno.EBADF, errno.ENXIO, errno.ECONNRESET}


class SurvivingFile(io.FileIO):
    """Raw file of a standard stream that drops data which cannot be written, instead of raising.

    Attributes:
        lost: last write error, such as a full disk; ``None`` if there was none. A reader or terminal that is gone does
            not count.
        incidental: whether the output only reports on work whose result is stored elsewhere.
    """

    lost: OSError | None = None
    incidental = False

    def write(self, data: bytes) -> int | None:  # type: ignore[override]  # any buffer
        """Write data; data that cannot be written counts as written."""
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _GONE:
                self.lost = error
                return memoryview(data).nbytes
            with suppress(OSError):  # redirect the descriptor too, because C libraries write to it
                nothing = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nothing, self.fileno())
                os.close(nothing)
            return memoryview(data).nbytes


@contextmanager
def surviving_streams() -> Iterator[None]:
    """Make failures of standard output and error harmless inside the block and at the interpreter's exit.

    Raises:
        SystemExit: with status 1, if a successful command's output is its result and was lost.
    """
    sys.stdout, sys.stderr = _surviving(sys.stdout), _surviving(sys.stderr)
    try:
        yield
    except SystemExit as end:
        if not end.code:
            _report_loss()
        raise
    else:
        _report_loss()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()


def output_is_incidental() -> None:
    """Declare that the command's result is stored elsewhere, so that lost standard output is not a failure."""
    if (file := _file_of(sys.stdout)) is not None:
        file.incidental = True


def _surviving(stream: TextIO) -> TextIO:
    """Stream that writes to the same place and survives write errors.

    Returned unchanged: every stream on Windows, and a stream that is not a standard stream of this process.
    """
    if os.name == "nt" or stream not in (sys.__stdout__, sys.__stderr__) or not isinstance(stream, io.TextIOWrapper):
        return stream
    try:
        stream.flush()
        file = SurvivingFile(stream.fileno(), "wb", closefd=False)
    except (OSError, ValueError):
        return stream
    return io.TextIOWrapper(
        io.BufferedWriter(cast("io.RawIOBase", file)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _file_of(stream: object) -> SurvivingFile | None:
    raw = getattr(getattr(stream, "buffer", None), "raw", None)
    return raw if isinstance(raw, SurvivingFile) else None


def _report_loss() -> None:
    file = _file_of(sys.stdout)
    if file is None:
        return
    with suppress(OSError):
        sys.stdout.flush()
    if file.lost is not None and not file.incidental:
        reason = file.lost.strerror
        print(f"error: standard output: {reason}; the output is not complete", file=sys.stderr)  # noqa: T201
        sys.exit(1)
