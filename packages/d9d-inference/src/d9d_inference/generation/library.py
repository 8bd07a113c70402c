"""Import of optional libraries, which are not installed with d9d-inference."""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any

from d9d_core.errors import PluginError
from d9d_core.untrusted import visible


def load_library(name: str, user: str) -> Any:
    """Import an optional library, and escape terminal control sequences in its log from now on.

    Args:
        name: name of the library's module, which is also the name of its distribution.
        user: command or component that needs the library, for the message.

    Raises:
        PluginError: the library is not installed.
    """
    try:
        library = import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise PluginError(f"{user} needs {name}; install it with: pip install {name}") from error
    for handler in logging.getLogger(name).handlers:
        if not isinstance(handler.formatter, _VisibleFormatter):
            handler.setFormatter(_VisibleFormatter(handler.formatter or logging.Formatter()))
    return library


class _VisibleFormatter(logging.Formatter):
    """Log formatter that escapes control sequences, as log records may quote untrusted files."""

    def __init__(self, inner: logging.Formatter) -> None:
        super().__init__()
        self._inner = inner

    def format(self, record: logging.LogRecord) -> str:
        return visible(self._inner.format(record))
