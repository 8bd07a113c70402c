"""Failures as the user reads them: messages of errors raised on purpose, and where in a plugin others came from."""

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

#: Characters of one part of a traceback.
_LONGEST = 2000
_FOUNDATION = ("d9d_weights", *sorted(name.replace("-", "_") for name in FOUNDATION))
#: Packages whose frames stand between the command line and a plugin.
_OWN = (*_FOUNDATION, "pluggy", "importlib")


def describe(error: D9dError) -> str:
    """The lines of an error raised on purpose and its notes, after the traceback of a plugin's failure behind it."""
    origin = "" if error.origin is None else _foreign_traceback(error.origin)
    lines = [f"error: {line}" for line in str(error).splitlines()]
    return origin + "\n".join([*lines, *getattr(error, "__notes__", ())])


@contextmanager
def exits_are_errors(kind: type[D9dError] = TrainingError) -> Iterator[None]:
    """Raise SystemExit and its like, where code of a plugin raises them inside the block, as errors that name it.

    Ctrl-C, and what d9d itself raises to end the process, pass.

    Raises:
        D9dError: of the given kind.
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
    """Error that stands for an exception with which a plugin wanted to end the process."""
    made = kind(
        f"{source} raised {shown(error)}, which is meant to end a process; a plugin raises an Exception instead"
    )
    made.origin = error
    return made


def source_of(error: BaseException) -> str | None:
    """Plugin whose code raised an exception, with file and line; ``None`` if it was d9d itself."""
    frames = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__) if not _is_between(frame)]
    if not frames or _package(frames[-1][0]) in _FOUNDATION:
        return None
    plugins = {
        candidate.origin.module.partition(".")[0]: candidate.origin
        for candidate in installed.scan()
        if candidate.origin.distribution not in FOUNDATION
    }
    # Whatever library the plugin calls: it is the plugin that d9d has called.
    frame, line = next((found for found in reversed(frames) if _package(found[0]) in plugins), frames[-1])
    where = f"{frame.f_code.co_filename}:{line}, in {frame.f_code.co_name}"
    origin = plugins.get(_package(frame))
    return f"{origin} ({where})" if origin else where


def _foreign_traceback(error: BaseException) -> str:
    """The traceback of an error in a plugin, without d9d's own frames; empty if there are no others."""
    own = [Path(file).parent for name in _OWN if (file := getattr(sys.modules.get(name), "__file__", None))]
    found = traceback.TracebackException.from_exception(error)
    # <...> is code without a file: importlib's, and the constructors of records.
    frames = [f for f in found.stack if not f.filename.startswith("<")]
    frames = [f for f in frames if not any(Path(f.filename).is_relative_to(folder) for folder in own)]
    found.stack[:] = frames
    return "".join(map(_cut, found.format())) if frames else ""


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text):,} characters)\n"


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _is_between(frame: FrameType) -> bool:
    # Python's own, and what calls code of plugins or raises for it.
    return _package(frame) in sys.stdlib_module_names or frame.f_globals.get("__name__") == ref.__name__
