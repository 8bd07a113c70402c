"""Logs of runs, written by the tracker ``jsonl``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_log(run: Path) -> list[dict[str, Any]]:
    """Entries of a run's ``metrics.jsonl``."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]


def read_log_without_times(run: Path) -> list[dict[str, Any]]:
    """Entries of a run's ``metrics.jsonl`` without series that depend on time or memory, which vary between runs."""
    of_time = ("tokens_per_second", "mfu")
    return [
        {name: value for name, value in line.items() if name not in of_time and not name.startswith("memory/")}
        for line in read_log(run)
    ]
