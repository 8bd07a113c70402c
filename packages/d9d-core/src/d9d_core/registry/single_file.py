"""Loads Python files that a policy names as single-file plugins."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType

from d9d_core.errors import PluginError
from d9d_core.registry.entries import Origin

__all__ = ["file_plugin"]


class _Loader(SourceFileLoader):
    """Loader of source bytes that were hashed; it ignores cached bytecode, which may belong to an older version."""

    def __init__(self, name: str, path: str, content: bytes) -> None:
        super().__init__(name, path)
        self._content = content

    def get_code(self, fullname: str) -> CodeType | None:  # noqa: ARG002 - one loader for each module
        return self.source_to_code(self._content, self.path)


def file_plugin(path: Path) -> tuple[Origin, Callable[[], object]]:
    """Single-file plugin: its origin, and the function that imports the file.

    Raises:
        PluginError: the file cannot be read.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise PluginError(f"plugin file {path}: {error.strerror or error}; give the path of a Python file") from error
    digest = hashlib.sha256(content).hexdigest()
    # The name contains the digest, so that two versions can coexist and f"{__name__}:Thing" is a valid reference.
    stem = re.sub(r"\W", "_", path.stem)
    name = f"d9d_file_{stem}_{digest[:12]}"

    def load() -> object:
        if name in sys.modules:
            return sys.modules[name]
        if path.suffix != ".py":
            raise ImportError(f"{path} is not a Python file")
        loader = _Loader(name, str(path), content)
        spec = ModuleSpec(name, loader, origin=str(path))
        spec.has_location = True  # sets __file__
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        return module

    return Origin(str(path), "", name, digest=digest), load
