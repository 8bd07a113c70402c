"""Where commands print to."""

from __future__ import annotations

import sys

from rich.console import Console


def console_for() -> Console:
    """Standard output. A pipe gets whole lines: whoever reads them cuts them as needed."""
    return Console() if sys.stdout.isatty() else Console(width=10_000)
