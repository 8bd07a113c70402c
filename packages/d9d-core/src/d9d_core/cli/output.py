"""Consoles that commands print to."""

from __future__ import annotations

import sys

from rich.console import Console


def console_for() -> Console:
    """Standard output, taking all text literally: plugins' texts may hold brackets.

    A pipe gets uncut lines: whoever reads them cuts them as needed.
    """
    width = None if sys.stdout.isatty() else 10_000
    return Console(width=width, markup=False, highlight=False)
