"""Consoles that commands print to: what they print controls no terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.segment import Segment

from d9d_core.untrusted import visible

__all__ = ["console_for"]


class VisibleConsole(Console):
    """Console whose texts control no terminal; only its own styles do."""

    def render(self, *args: Any, **kwargs: Any) -> Iterable[Segment]:
        """Render, with escapes in place of characters that control a terminal."""
        for segment in super().render(*args, **kwargs):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)


def console_for() -> Console:
    """Standard output, taking all text literally: plugins' texts may hold brackets.

    A pipe gets uncut lines; its reader cuts them as needed.
    """
    width = None if sys.stdout.isatty() else 10_000
    return VisibleConsole(width=width, markup=False, highlight=False)
