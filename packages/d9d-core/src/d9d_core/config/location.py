"""Locations of values in a job file."""

from __future__ import annotations

from collections.abc import Sequence

Location = tuple[int | str, ...]


def dotted(location: Sequence[int | str]) -> str:
    """``('parallel', 0, 'degree')`` as ``parallel[0].degree``."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return text.removeprefix(".")
