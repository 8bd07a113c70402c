"""Consoles for commands' output, with control characters escaped."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.segment import Segment

from d9d_core.untrusted import visible

__all__ = ["console_for"]


class VisibleConsole(Console):
    """Console that escapes control characters in printed text; only the console's own styles emit them."""

    def render(self, *args: Any, **kwargs: Any) -> Iterable[Segment]:
        """Render an object to segments, with escapes instead of control characters."""
        for segment in super().render(*args, **kwargs):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)


def console_for() -> Console:
    """Console on standard output that prints text literally: plugins may print brackets, or words between colons.

    Lines for a pipe are not wrapped.
    """
    width = None if sys.stdout.isatty() else 10_000
    return VisibleConsole(width=width, markup=False, highlight=False, emoji=False)
