"""Imports of the Python objects that job files name by import paths."""

from __future__ import annotations

import importlib
from typing import Any

from d9d_core.config import closest
from d9d_core.containment import FOREIGN_FAILURES
from d9d_core.errors import JobError


def import_path(where: str, path: str) -> Any:
    """Import the object at a path: ``package.module.name`` or ``package.module:name``.

    Args:
        where: field of the job file, for error messages.
        path: import path.

    Raises:
        JobError: the path is malformed, its module or name does not exist, or the import of the module fails.
    """
    module_name, _, name = path.replace(":", ".").rpartition(".")
    if not name.isidentifier() or not all(module_name.split(".")) or " " in path:
        raise JobError(f"{where}: {path!r} is not an import path; write package.module.name")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise JobError(
            f"{where}: {path!r} cannot be imported: there is no module {error.name!r}; install its package, or correct "
            "the path"
        ) from error
    except FOREIGN_FAILURES as error:
        raise JobError(f"{where}: the module {module_name!r} fails to import: {error!r}; correct it") from error
    try:
        return getattr(module, name)
    except AttributeError:
        near = closest(name, [other for other in dir(module) if not other.startswith("_")])
        hint = f"; did you mean {module_name}.{near}?" if near else ""
        raise JobError(f"{where}: the module {module_name!r} has no {name!r}{hint}") from None
