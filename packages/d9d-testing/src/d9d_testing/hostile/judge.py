"""Judge of file readers: a reader may refuse a file, read it, raise another error, hang, or touch forbidden files."""

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


class WrongLoad(Exception):  # noqa: N818 - the name describes the outcome
    """A damaged file was read without an error, but with wrong values."""


class Endless(BaseException):
    """The time limit was exceeded. A BaseException, so that readers do not catch it."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Verdict on one file.

    Attributes:
        kind: outcome of reading.
        about: error and its place, or the forbidden files that were touched; empty if the file was read.
    """

    kind: Kind
    about: str = ""

    @property
    def is_sound(self) -> bool:
        """Whether the outcome is acceptable: the file was refused, or read correctly."""
        return self.kind in ("refused", "read")


class Judge:
    """Judge of readers of hostile input, for the main thread. Its audit hook cannot be removed, so create only one.

    Args:
        inside: directories that readers may read and write.
        seconds: limit on a reader's CPU time; the limit on its elapsed time is five times as long.
    """

    def __init__(self, *inside: Path, seconds: float = 10) -> None:
        own = [sys.prefix, sys.base_prefix, "/usr", "/lib", "/proc", "/sys", "/dev/null", "/dev/urandom"]
        own += [path for path in sys.path if path]
        self._inside = tuple(os.path.realpath(path) for path in [*own, *map(str, inside)])
        self._seconds = seconds
        self._touched: list[str] | None = None
        sys.addaudithook(self._on_event)

    def __call__(self, read: Callable[[], object]) -> Verdict:
        """Call a reader of hostile input, and return the verdict on the call."""
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
            return  # open() will fail on the link, so it touches no file
        real = os.path.realpath(path)
        # Special files are refused after they were opened; reading one would hang, which is judged separately.
        writes = flags & (os.O_WRONLY | os.O_RDWR)
        if (writes or Path(real).is_file()) and not any(real == d or real.startswith(d + os.sep) for d in self._inside):
            self._touched.append(real)


def _printed(error: D9dError) -> Verdict:
    """Verdict on a d9d error, whose text must be printable and short."""
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
    """Limit the time of :func:`_watched` inside the block."""

    def stop(_number: int, frame: FrameType | None) -> None:
        # Raise only inside _watched: an exception while the timers are being stopped would leave one running.
        while frame is not None:
            if frame.f_code is _watched.__code__:
                raise Endless
            frame = frame.f_back

    # CPU time, so that a busy machine causes no failure; a reader that waits without computing gets more time.
    clocks = ((signal.SIGPROF, signal.ITIMER_PROF, seconds), (signal.SIGALRM, signal.ITIMER_REAL, 5 * seconds))
    before = [signal.signal(number, stop) for number, _, _ in clocks]
    for _, clock, limit in clocks:
        signal.setitimer(clock, limit, 1)  # repeated every second, because exceptions in callbacks are lost
    try:
        yield
    finally:
        for (number, clock, _), handler in zip(clocks, before, strict=True):
            signal.setitimer(clock, 0)
            signal.signal(number, handler)
