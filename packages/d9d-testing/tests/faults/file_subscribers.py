"""Subscribers that write files, with one fault each. Other processes load their implementation from a file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from d9d_testing.suites.subscriber import SubscriberSuite

HERE = Path(__file__).parent / "implementations"


class Sound(SubscriberSuite):
    plugin = str(HERE / "file_subscribers.py")
    target = "steps_file"
    fault = "none"

    def fields(self, directory: Path) -> Mapping[str, Any]:
        return {"path": str(directory / "steps.jsonl"), "fault": self.fault}

    def broken_fields(self, directory: Path) -> Mapping[str, Any]:
        (directory / "file").touch()
        return {"path": str(directory / "file" / "steps.jsonl")}


FAULTS: Mapping[str, tuple[dict[str, Any], str]] = {
    fault: ({"fault": fault}, "")
    for fault in (
        "every rank writes",
        "writes steps again",
        "starts a new file",
        "writes the numbers of its rank",
        "forgets its count",
    )
}
