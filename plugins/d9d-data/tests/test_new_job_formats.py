"""``d9d new job`` reads the formats of the datasets ``chat`` and ``preference``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from d9d_core.errors import DataError
from d9d_data.new_job.found import look_at_records
from d9d_data.new_job.kinds import KINDS

SIDES = {"chosen": "b", "rejected": "c"}


def looked(directory: Path, kind: str, record: dict[str, Any]) -> Any:
    file = directory / "a.jsonl"
    file.write_text(json.dumps(record) + "\n")
    return look_at_records([str(file)], KINDS[kind], None).fields


@pytest.mark.parametrize(
    ("kind", "record", "fields"),
    [
        ("sft", {"messages": []}, {}),
        ("sft", {"conversations": []}, {"format": "sharegpt"}),
        ("lora", {"instruction": "a", "input": "", "output": "b"}, {"format": "alpaca"}),
        ("dpo", {"prompt": "a", **SIDES}, {}),
        ("dpo", SIDES, {}),
        ("dpo", {"question": "a", **SIDES}, {"format": "question"}),
    ],
)
def test_the_format_of_records_becomes_a_field_of_the_job(
    tmp_path: Path, kind: str, record: dict[str, Any], fields: dict[str, str]
) -> None:
    assert looked(tmp_path, kind, record) == fields


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_unknown_records_are_refused_with_the_formats(tmp_path: Path, kind: str) -> None:
    with pytest.raises(DataError, match=r"--data: .*a.jsonl:1 has the fields of no known format \(it has text\)"):
        looked(tmp_path, kind, {"text": "a"})
