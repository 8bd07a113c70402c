"""The datasets keep what holds for every one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from d9d_testing.suites.dataset import DatasetSuite

WORDS = ["quick", "brown", "fox", "jumps", "over", "lazy", "dog", "and", "runs", "away", "from", "it", "all"]


class OverFiles(DatasetSuite):
    other: ClassVar = {"sequence_length": 8}

    def fields(self, directory: Path) -> Mapping[str, Any]:
        for index in range(40):
            text = " ".join(WORDS[(index * 3 + place) % len(WORDS)] for place in range(2 + index % 7))
            (directory / f"{index:02}.txt").write_text(f"{index} {text}\n")
        return {"sources": [str(directory)], "sequence_length": 16}


class TestText(OverFiles):
    target = "text"
    workers = None  # they start slowly, and are those of the other dataset


class TestDocuments(OverFiles):
    target = "documents"


class TestDocumentsInOrder(OverFiles):
    target = "documents"
    config: ClassVar = {"shuffle": False, "bucket_window": 16}
    shuffled = False
    workers = None
