"""Section of a job file on Python's garbage collection."""

from __future__ import annotations

from pydantic import PositiveInt

from d9d_core.config import Section

__all__ = ["GarbageCollection"]


class GarbageCollection(Section):
    """Garbage collection of Python at the same steps on all processes, in place of moments of its own on each."""

    every: PositiveInt | None = 100
    """Steps between two collections of young objects; all objects are collected with each checkpoint. Null leaves it
    to Python."""
