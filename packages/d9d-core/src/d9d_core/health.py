"""Outcome of a health check of ``d9d doctor``."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Health"]


@dataclass(frozen=True, slots=True)
class Health:
    """Outcome of one health check.

    Attributes:
        ok: whether the check passed; if not, the exit status of ``d9d doctor`` is 1.
        message: result of the check, in one line.
        advice: remedy of a problem; a check that passed with advice is shown as a warning.
    """

    ok: bool
    message: str
    advice: str = ""
