"""Job file section ``garbage_collection``: Python's garbage collection at fixed steps."""

from __future__ import annotations

from pydantic import PositiveInt

from d9d_core.config import Section

__all__ = ["GarbageCollection"]


class GarbageCollection(Section):
    """Python's garbage collection at the same steps on all processes, instead of at different times on each."""

    every: PositiveInt | None = 100
    """Steps between two collections of young objects; all objects are collected after each checkpoint and evaluation.
    Null disables this section, so that Python collects automatically."""
