"""Every field of a job file stands in a page and occurs in a test."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest
from d9d_core.job_file.lookup import load_config
from d9d_engine.job import Job
from d9d_inference.job import InferenceJob

ROOT = Path(__file__).resolve().parents[1]
TESTS = ("tests", "packages/*/tests", "plugins/*/tests", "packages/d9d-testing/src")


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("field_page")


def test_the_page_of_fields_is_up_to_date_and_each_field_has_a_meaning(pages: ModuleType) -> None:
    text = pages.page()
    assert text == pages.PAGE.read_text("utf-8"), "run: uv run python tools/field_page.py"
    assert "|  |" not in text
    assert "| `rope_scaling.factor (type: yarn)` | number >= 1 | required | " in text
    assert "| `heads.NAME.kind (kind: classification)` | classification |" in text
    assert "| `groups[].match` | text | required |" in text


def test_every_field_occurs_in_a_test(pages: ModuleType) -> None:
    configs = [(entry.spec.key, load_config(entry)) for entry in pages.components()]
    names = {
        f"{key}.{name.partition(' ')[0]}"
        for key, config in [*configs, ("job", Job), ("inference job", InferenceJob)]
        for name, _, _ in pages.fields_of(config)
    }
    assert len(names) > 500
    files = [file for place in TESTS for folder in ROOT.glob(place) for file in folder.rglob("*.py")]
    words = {word for file in files for word in re.findall(r"\w+", file.read_text("utf-8"))}
    assert sorted(name for name in names if name.rpartition(".")[2] not in words) == []
