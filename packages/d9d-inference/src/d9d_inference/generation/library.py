"""Optional libraries: imported when a command or a subscriber needs them, never installed with d9d-engine."""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any

from d9d_core.errors import PluginError
from d9d_core.untrusted import visible


def load_library(name: str, user: str) -> Any:
    """Import a library that d9d-engine does not depend on; what its log quotes controls no terminal from now on.

    Args:
        name: of the library, which is that of its distribution.
        user: who needs it, for the message.

    Raises:
        PluginError: it is not installed.
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
    """Formatter of log records that quote files of strangers, such as a value in ``config.json``."""

    def __init__(self, inner: logging.Formatter) -> None:
        super().__init__()
        self._inner = inner

    def format(self, record: logging.LogRecord) -> str:
        return visible(self._inner.format(record))
