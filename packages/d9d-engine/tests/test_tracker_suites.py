"""Core's own trackers keep what holds for every one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from d9d_engine.trackers.lines import read_lines
from d9d_testing.suites.tracker import TrackerSuite


class TestConsole(TrackerSuite):
    target = "console"


class TestJsonl(TrackerSuite):
    target = "jsonl"
    config: ClassVar = {"picture": False}

    def logged(self, directory: Path) -> Mapping[int, Mapping[str, float | None]]:
        found: dict[int, dict[str, Any]] = {}
        for line in read_lines(directory / "metrics.jsonl"):
            found.setdefault(line.pop("step"), {}).update(line)
        return found

    def logged_tables(self, directory: Path) -> Mapping[int, Sequence[str]]:
        found: dict[int, list[str]] = {}
        for line in read_lines(directory / "tables.jsonl"):
            found.setdefault(line["step"], []).append(line["table"])
        return found
