"""Judge of what reading a file does: refused, read, a traceback, no end, or more files than it may touch."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from d9d_core.errors import D9dError
from d9d_core.failures import describe

Kind = Literal["refused", "read", "traceback", "hang", "outside", "wrong"]


class WrongLoad(Exception):  # noqa: N818 - says what it is
    """A damaged file was read, with other values than the undamaged one has."""


class Endless(BaseException):
    """The time is up. No reader may catch it."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Verdict on one file.

    Attributes:
        kind: what reading did.
        about: the error and where it came from; empty if all went well.
    """

    kind: Kind
    about: str = ""

    @property
    def is_sound(self) -> bool:
        """Whether that is how it should be."""
        return self.kind in ("refused", "read")


class Judge:
    """Judge of readers of hostile input, for the main thread. Its audit hook stays, so make one only.

    Args:
        inside: directories that may be read and written.
        seconds: of the processor's time that a reader may take, and five times as long to wait.
    """

    def __init__(self, *inside: Path, seconds: float = 10) -> None:
        own = [sys.prefix, sys.base_prefix, "/usr", "/lib", "/proc", "/sys", "/dev/null", "/dev/urandom"]
        own += [path for path in sys.path if path]
        self._inside = tuple(os.path.realpath(path) for path in [*own, *map(str, inside)])
        self._seconds = seconds
        self._touched: list[str] | None = None
        sys.addaudithook(self._on_event)

    def __call__(self, read: Callable[[], object]) -> Verdict:
        """Judge one call of a reader."""
        touched: list[str] = []
        self._touched = touched
        try:
            with _alarm(self._seconds):
                _watched(read)
            verdict = Verdict("read")
        except Endless as error:
            verdict = Verdict("hang", _place(error))
        except WrongLoad as error:
            verdict = Verdict("wrong", str(error))
        except D9dError as error:
            verdict = _printed(error)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            verdict = Verdict("traceback", f"{type(error).__name__}: {_place(error)}: {str(error)[:80]!r}")
        finally:
            self._touched = None
        return Verdict("outside", ", ".join(touched[:3])) if touched and verdict.is_sound else verdict

    def _on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._touched is None or event != "open" or not isinstance(arguments[0], str | bytes | Path):
            return
        path, flags = os.fsdecode(arguments[0]), arguments[2] or 0
        if flags & os.O_NOFOLLOW and Path(path).is_symlink():
            return  # refused by the system
        real = os.path.realpath(path)
        # What is no regular file is refused after it was opened; were it read, that would never end.
        writes = flags & (os.O_WRONLY | os.O_RDWR)
        if (writes or Path(real).is_file()) and not any(real == d or real.startswith(d + os.sep) for d in self._inside):
            self._touched.append(real)


def _printed(error: D9dError) -> Verdict:
    """Verdict on an error raised on purpose, which must be one that a terminal and a log can take."""
    try:
        text = describe(error)
        text.encode()
    except Exception as second:
        return Verdict("traceback", f"{type(second).__name__} while {type(error).__name__} is printed: {_place(error)}")
    if len(text) > 10_000:
        return Verdict("traceback", f"{type(error).__name__} of {len(text)} characters: {_place(error)}")
    return Verdict("refused", type(error).__name__)


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f"{os.sep}d9d_" in f.filename and "d9d_testing" not in f.filename]
    last = own[-1] if own else frames[-1]
    return f"{Path(last.filename).name}:{last.lineno}"


def _watched(read: Callable[[], object]) -> None:
    read()


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Limit of the time that :func:`_watched` may take within the block."""

    def stop(_number: int, frame: FrameType | None) -> None:
        # Not around it: what is raised while the clocks are stopped would leave one running.
        while frame is not None:
            if frame.f_code is _watched.__code__:
                raise Endless
            frame = frame.f_back

    # Of the processor's time, so that a busy machine is no fault; who waits and uses none gets several times as much.
    clocks = ((signal.SIGPROF, signal.ITIMER_PROF, seconds), (signal.SIGALRM, signal.ITIMER_REAL, 5 * seconds))
    before = [signal.signal(number, stop) for number, _, _ in clocks]
    for _, clock, limit in clocks:
        signal.setitimer(clock, limit, 1)  # again, because what is raised in a callback of the interpreter is lost
    try:
        yield
    finally:
        for (number, clock, _), handler in zip(clocks, before, strict=True):
            signal.setitimer(clock, 0)
            signal.signal(number, handler)
