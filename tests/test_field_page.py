"""Every field of a job file stands in a page and occurs in a test."""

from __future__ import annotations

import ast
import importlib
import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
from d9d_core.config import PluginConfig, Section
from d9d_core.job_file.fields import fields_of, sections_of
from d9d_core.job_file.lookup import load_config
from d9d_engine.job import Job
from d9d_inference.job import InferenceJob

ROOT = Path(__file__).resolve().parents[1]
_ASSIGNED = re.compile(r"(\w+)(?:\[\d*\])?['\"]?\s*[:=]\s*(\"[^\"]*\"|'[^']*'|[^,}\]\s]*)")
TESTS = ("tests", "packages/*/tests", "plugins/*/tests", "packages/d9d-testing/src")


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("field_page")


@pytest.mark.thorough
def test_the_page_of_fields_is_up_to_date_and_each_field_has_a_meaning(pages: ModuleType) -> None:
    text = pages.page()
    assert text == pages.PAGE.read_text("utf-8"), "run: uv run python tools/field_page.py"
    assert "|  |" not in text
    assert "| `rope_scaling.factor (type: yarn)` | number >= 1 | required | " in text
    assert "| `heads.NAME.kind (kind: classification)` | classification |" in text
    assert "| `groups[].match` | text | required |" in text


def _text(node: ast.expr) -> str | None:
    """Constant as text; ``?`` stands for each computed part of an f-string."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else json.dumps(node.value, default=str)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "?" for part in node.values)
    return None


def _settings(tree: ast.Module) -> Iterator[tuple[str, str | None]]:
    """Fields that a test file sets, with their values; ``None`` for computed values.

    A field is set by a keyword argument, an item of a dict, a pair in a table of cases, or a text such as ``lr=3``.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg:
            yield node.arg, _text(node.value)
        elif isinstance(node, ast.Dict | ast.Tuple | ast.List):
            pairs = zip(node.keys, node.values, strict=True) if isinstance(node, ast.Dict) else pairwise(node.elts)
            for key, value in pairs:
                if isinstance(key, ast.Constant) and isinstance(key.value, str):
                    yield key.value.rpartition(".")[2], _text(value)
        elif isinstance(node, ast.Constant | ast.JoinedStr):
            yield from _ASSIGNED.findall(_text(node) or "")


def _differs(value: str | None, default: str | None) -> bool:
    if value is None or "?" in value or default is None:
        return True
    try:
        return float(value) != float(default)
    except ValueError:
        return value.strip("\"'") != default


def _owned(section: type[Section]) -> Iterator[tuple[type, str, str | None]]:
    """Fields of a section and its inner sections: class that defines the field, name, default as YAML."""
    lines = {line.name: line for line in fields_of(section)}
    for name, field in section.model_fields.items():
        if name in lines and lines[name].kind != lines[name].default:  # otherwise the field selects the section
            # The first definition, as other classes may only change the default.
            owner = next(one for one in reversed(section.__mro__) if name in vars(one).get("__annotations__", {}))
            yield owner, name, lines[name].default
        for _, part in sections_of(field.annotation):
            yield from _owned(part)


@pytest.mark.thorough
def test_a_test_gives_each_field_another_value_than_its_default(pages: ModuleType) -> None:
    """The test must name a component that has the field; for a section, it may be any test of the section's package."""
    texts = {file: file.read_text("utf-8") for place in TESTS for at in ROOT.glob(place) for file in at.rglob("*.py")}
    given: dict[str, list[tuple[Path, str | None]]] = {}
    for file, text in texts.items():
        for name, value in _settings(ast.parse(text)):
            given.setdefault(name, []).append((file, value))
    users: dict[tuple[type, str, str | None], set[str]] = {}
    for entry in pages.components():
        for field in _owned(load_config(entry)):
            users.setdefault(field, {field[0].__name__}).add(entry.spec.key)
    for job in (Job, InferenceJob):
        for field in _owned(job):
            users.setdefault(field, set()).add("")  # in any test
    assert len(users) > 400
    untested = []
    for (owner, name, default), keys in users.items():
        home = None if issubclass(owner, PluginConfig) else owner.__module__.partition(".")[0].replace("_", "-")
        names = re.compile(rf"\b({'|'.join(map(re.escape, keys))})\b")
        if not any(
            _differs(value, default) and (home in file.parts or names.search(texts[file]))
            for file, value in given.get(name, ())
        ):
            untested.append(f"{owner.__name__}.{name}")
    assert untested == []
