"""Prose of the repository keeps to plain sentences."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def sentences(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("sentences")


@pytest.mark.thorough
def test_phrases_that_make_prose_hard_to_read_are_rare(sentences: ModuleType) -> None:
    rates = sentences.rates(sentences.repository())
    over = {phrase: round(rate, 2) for phrase, rate in rates.items() if rate > sentences.LIMITS[phrase]}
    assert not over, "say the noun instead; `tools/sentences.py PATH` prints the places"


def test_phrases_are_found_in_docstrings_comments_messages_and_pages(sentences: ModuleType) -> None:
    source = '"""Parts of\n    nobody."""\n# Those\n# of ranks.\nX = "not what is here", "nobody"\n'
    python = list(sentences.passages("x.py", source))
    assert [(passage.line, passage.text) for passage in python] == [
        (1, "Parts of nobody."),
        (5, "not what is here"),
        (3, "Those of ranks."),
    ]
    page = list(sentences.passages("x.md", "# Nobody\n\nWhoever\nreads\n\n```\nnobody\n```\nbeside\n"))
    assert [(passage.line, passage.text) for passage in page] == [(1, "# Nobody"), (3, "Whoever reads"), (9, "beside")]
    rates = sentences.rates([*python, *page])
    assert rates["nobody"] == pytest.approx(10_000 * 2 / 15)
    assert rates["those of"] == pytest.approx(10_000 / 15)
