"""Advice for plugins that fail to import a module or name of d9d."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from d9d_core.registry.hooks import NEWEST_API

_PACKAGES = ("d9d_core", "d9d_weights", "d9d_engine")
_NAME = re.compile(r"cannot import name '(\w+)'")


def import_advice(error: BaseException) -> str:
    """Advice to append to an import error about d9d: the modules that define the name.

    The text is empty for other errors.
    """
    if not isinstance(error, ImportError) or (error.name or "").partition(".")[0] not in _PACKAGES:
        return ""
    name = _NAME.search(str(error))
    if name is None:
        return f"; plugin API {NEWEST_API} has no module {error.name}: import names from the modules that define them"
    homes = [f"{module}.{name[1]}" for module in _modules_with(name[1])]
    return f"; plugin API {NEWEST_API} has {' and '.join(homes) or f'no name {name[1]}'}"


def _modules_with(name: str) -> list[str]:
    """Modules with a name in their ``__all__``, found by reading sources, because importing them may take seconds."""
    found = []
    for package in _PACKAGES:
        spec = find_spec(package)
        for root in map(Path, (spec and spec.submodule_search_locations) or ()):
            for file in sorted(root.rglob("*.py")):
                declared = re.search(r"^__all__ = \[(.*?)\]", file.read_text("utf-8"), re.DOTALL | re.MULTILINE)
                if declared and f'"{name}"' in declared[1]:
                    found.append(".".join([package, *file.relative_to(root).with_suffix("").parts]))
    return found
