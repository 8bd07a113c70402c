"""Lookup of the backends that a job asks for by name. Imports no torch."""

from __future__ import annotations

from d9d_core.errors import PluginError
from d9d_core.plugin.entries import Entry, plugin_error
from d9d_core.plugin.registry import Registry

#: Every op's own implementation; it runs everywhere and belongs to no plugin.
REFERENCE = "reference"


def find_kernel(registry: Registry, op: str, selector: str) -> Entry | None:
    """Backend of ``op`` that ``name`` or ``distribution/name`` selects; ``None`` for the reference.

    Raises:
        PluginError: it is unknown, ambiguous, or comes from a plugin that is absent, blocked or broken.
    """
    if selector == REFERENCE:
        return None
    distribution, slash, name = selector.rpartition("/")
    try:
        return registry.find("kernel", f"{distribution}{slash}{op}.{name}")
    except PluginError as error:
        raise plugin_error(f"kernels.{op}: {error}", error.origin) from error.origin
