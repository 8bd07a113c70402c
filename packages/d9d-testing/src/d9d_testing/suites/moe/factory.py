"""Lookup of a suite's factory by name, so that other processes can find it too."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from typing import Any

from d9d_core.plugin import Ref


def load_factory(target: str) -> Callable[..., Any]:
    """Load the object that ``module:attribute`` or ``file.py:attribute`` names."""
    file, _, name = target.rpartition(":")
    loaded: Callable[..., Any] = runpy.run_path(file)[name] if file.endswith(".py") else Ref(target).load()
    return loaded
