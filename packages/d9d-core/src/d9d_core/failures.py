"""Texts of errors for the user: the message of one raised on purpose, and where in a plugin it came from."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

from d9d_core.errors import D9dError

#: Packages whose frames stand between the command line and a plugin.
_OWN = ("d9d_core", "d9d_engine", "d9d_weights", "pluggy", "importlib")


def describe(error: D9dError) -> str:
    """The lines of an error raised on purpose, after the traceback of the plugin's own failure behind it, if any."""
    origin = "" if error.origin is None else _foreign_traceback(error.origin)
    return origin + "\n".join(f"error: {line}" for line in str(error).splitlines())


def _foreign_traceback(error: BaseException) -> str:
    """The traceback of an error in a plugin, without d9d's own frames; empty if there are no others."""
    own = [Path(file).parent for name in _OWN if (file := getattr(sys.modules.get(name), "__file__", None))]
    found = traceback.TracebackException.from_exception(error)
    # <...> is code without a file: importlib's, and the constructors of records.
    frames = [f for f in found.stack if not f.filename.startswith("<")]
    frames = [f for f in frames if not any(Path(f.filename).is_relative_to(folder) for folder in own)]
    found.stack[:] = frames
    return "".join(found.format()) if frames else ""
