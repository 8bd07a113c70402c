"""Optional libraries: imported when a command or a subscriber needs them, never installed with d9d-engine."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from d9d_core.errors import PluginError


def load_library(name: str, user: str) -> Any:
    """Import a library that d9d-engine does not depend on.

    Args:
        name: of the library, which is that of its distribution.
        user: who needs it, for the message.

    Raises:
        PluginError: it is not installed.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise PluginError(f"{user} needs {name}; install it with: pip install {name}") from error
