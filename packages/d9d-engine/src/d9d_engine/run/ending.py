"""Ending of a run that has done all that its job asks for, as a file in its directory. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from d9d_core.untrusted import parse_json, read_regular
from d9d_weights.files.atomic import write_json

FILE = "finished.json"


def clear_ending(directory: Path) -> None:
    """Remove the ending of an earlier start."""
    (directory / FILE).unlink(missing_ok=True)


def write_ending(directory: Path, step: int, total: int, reason: str | None) -> None:
    """Write that a run is done, which is the last that it does.

    Args:
        directory: of the run.
        step: optimizer steps done.
        total: steps that the job asked for, or that its epochs have.
        reason: why a subscriber ended the run before that.
    """
    write_json(directory / FILE, {"step": step, "steps": total, "reason": reason})


def read_ending(directory: Path) -> Mapping[str, Any] | None:
    """Ending of a run: ``step``, ``steps`` and ``reason``; ``None`` if it is not done, or its file is damaged."""
    try:
        values = parse_json(read_regular(directory / FILE))
    except (OSError, ValueError):
        return None
    sound = isinstance(values, dict) and all(type(values.get(name)) is int for name in ("step", "steps"))
    return values if sound else None
