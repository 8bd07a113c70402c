"""Lookup of the backends that a job asks for by name. Imports no torch."""

from __future__ import annotations

from d9d_core.errors import PluginError
from d9d_core.registry.entries import Entry, plugin_error
from d9d_core.registry.known import KnownPlugins
from d9d_core.registry.registry import Registry

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
        # A named or broken plugin may be the only one that offers the op; the error speaks of it.
        if not distribution and all(problem.loaded for problem in registry.problems):
            names = {*(entry.spec.key for entry in registry.entries("kernel")), *KnownPlugins.shipped().names("kernel")}
            ops = sorted({known.partition(".")[0] for known in names})
            if op not in ops:
                text = f"kernels.{op}: unknown op '{op}', no kernel is for it; ops with kernels: {', '.join(ops)}"
                raise PluginError(text) from None
        raise plugin_error(f"kernels.{op}: {error}", error.origin) from error.origin
