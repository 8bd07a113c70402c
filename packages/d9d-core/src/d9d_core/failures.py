"""Formats errors for the user, and finds the plugin whose code raised an exception."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from d9d_core import containment as ref
from d9d_core.errors import D9dError, TrainingError
from d9d_core.registry import installed
from d9d_core.registry.entries import shown
from d9d_core.registry.policy import FOUNDATION

__all__ = ["describe"]

#: Largest number of characters of one traceback entry; longer entries are cut.
_LONGEST = 2000
_FOUNDATION = ("d9d_weights", *sorted(name.replace("-", "_") for name in FOUNDATION))
#: Packages whose frames lie between the command line and a plugin.
_OWN = (*_FOUNDATION, "pluggy", "importlib")


def describe(error: D9dError) -> str:
    """Text of an error for the user: the traceback of a plugin that caused it, if any; message lines; notes."""
    origin = "" if error.origin is None else _foreign_traceback(error.origin)
    lines = [f"error: {line}" for line in str(error).splitlines()]
    return origin + "\n".join([*lines, *getattr(error, "__notes__", ())])


@contextmanager
def exits_are_errors(kind: type[D9dError] = TrainingError) -> Iterator[None]:
    """Convert SystemExit and similar exceptions of plugin code inside the block to errors that name the plugin.

    Ctrl-C, and exceptions by which d9d itself ends the process, pass unchanged.

    Raises:
        D9dError: an error of class ``kind``, if plugin code tried to end the process.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        if (source := source_of(error)) is None:
            raise
        raise ended_by(source, error, kind) from error


def ended_by(source: str, error: BaseException, kind: type[D9dError] = TrainingError) -> D9dError:
    """Error that replaces an exception by which a plugin tried to end the process."""
    made = kind(
        f"{source} raised {shown(error)}, which would end the process; a plugin must raise an Exception instead"
    )
    made.origin = error
    return made


def source_of(error: BaseException) -> str | None:
    """Plugin whose code raised an exception, with file and line; ``None`` if d9d's own code raised it.

    If the code belongs to no plugin, only file and line.
    """
    frames = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__) if not _is_between(frame)]
    if not frames or _package(frames[-1][0]) in _FOUNDATION:
        return None
    plugins = {
        candidate.origin.module.partition(".")[0]: candidate.origin
        for candidate in installed.scan()
        if candidate.origin.distribution not in FOUNDATION
    }
    # Take the innermost frame of a plugin, even if a library that the plugin calls raised the exception.
    frame, line = next((found for found in reversed(frames) if _package(found[0]) in plugins), frames[-1])
    where = f"{frame.f_code.co_filename}:{line}, in {frame.f_code.co_name}"
    origin = plugins.get(_package(frame))
    return f"{origin} ({where})" if origin else where


def _foreign_traceback(error: BaseException) -> str:
    """Traceback of an error in a plugin, without d9d's own frames; empty if no frames remain."""
    own = [Path(file).parent for name in _OWN if (file := getattr(sys.modules.get(name), "__file__", None))]
    found = traceback.TracebackException.from_exception(error)
    # Files named <...> are code without a file: importlib's, and the constructors of records.
    frames = [f for f in found.stack if not f.filename.startswith("<")]
    frames = [f for f in frames if not any(Path(f.filename).is_relative_to(folder) for folder in own)]
    found.stack[:] = frames
    return "".join(map(_cut, found.format())) if frames else ""


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text):,} characters)\n"


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _is_between(frame: FrameType) -> bool:
    # Such frames belong to Python's library, or to d9d's replacement of ``os._exit``.
    return _package(frame) in sys.stdlib_module_names or frame.f_globals.get("__name__") == ref.__name__
