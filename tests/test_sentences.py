"""Prose of the repository keeps to plain sentences."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def sentences(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("sentences")


@pytest.mark.thorough
def test_phrases_that_make_prose_hard_to_read_are_rare(sentences: ModuleType) -> None:
    counts = sentences.counts(sentences.repository())
    over = {phrase: count for phrase, count in counts.items() if count > sentences.LIMITS[phrase]}
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
    counts = sentences.counts([*python, *page])
    assert (counts["nobody"], counts["those of"], counts["what is"]) == (2, 1, 1)


def texts(found: Iterable[Any]) -> list[str]:
    return [passage.text for passage in found]


def test_computed_parts_and_code_are_words(sentences: ModuleType) -> None:
    found = texts(sentences.passages("x.py", 'X = f"that {name} of {what!r:>5}"\n"""the ``x`` of it"""\n'))
    assert found == ["that X of X", "the X of it"]
    assert texts(sentences.passages("x.md", "All that\n`x` of y\n")) == ["All that X of y"]


def test_one_word_of_prose_is_prose(sentences: ModuleType) -> None:
    source = 'A = ["Nobody", "nobody!", "nobody", "a/nobody", "name=nobody", "no_body"]\n'
    assert texts(sentences.passages("x.py", source)) == ["Nobody", "nobody!"]


def test_only_code_blocks_of_a_page_are_code(sentences: ModuleType) -> None:
    page = (
        "```x``` begins a line\n\n- an item\n\n    of a list\n\n1. two\n\n   ```py\n   code\n   ```\n\nText:\n\n    x\n"
    )
    assert texts(sentences.passages("x.md", page)) == ["X begins a line", "- an item", "of a list", "1. two", "Text:"]
