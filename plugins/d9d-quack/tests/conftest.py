"""Stand-in for the library: a module of it, with the functions that a test brings along."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest

Install = Callable[..., None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Installs functions, by their own names, as a module of the library, whether that is there or not."""

    def install(module: str, *functions: Callable[..., Any]) -> None:
        package, inside = ModuleType("quack"), ModuleType(module)
        package.__spec__ = ModuleSpec("quack", None)
        for function in functions:
            setattr(inside, function.__name__, function)
        monkeypatch.setitem(sys.modules, "quack", package)
        monkeypatch.setitem(sys.modules, module, inside)

    return install
