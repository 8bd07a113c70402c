"""Outcome of a health check of ``d9d doctor``."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Health"]


@dataclass(frozen=True, slots=True)
class Health:
    """Outcome of one health check: whether it passed, and a text."""

    ok: bool
    message: str
