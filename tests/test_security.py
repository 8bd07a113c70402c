"""Each threat that SECURITY.md lists has a test that exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROWS = re.findall(r"^\|.*`([\w/.-]+\.py)::(\w+)` \|$", (ROOT / "SECURITY.md").read_text("utf-8"), re.MULTILINE)


def test_the_table_has_a_test_in_every_row() -> None:
    text = (ROOT / "SECURITY.md").read_text("utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ") and "---" not in line][1:]
    assert len(rows) == len(ROWS) >= 12


@pytest.mark.parametrize(("file", "name"), ROWS)
def test_a_test_of_the_table_exists(file: str, name: str) -> None:
    tree = ast.parse((ROOT / file).read_text("utf-8"))
    assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_templates_are_rendered_in_one_place() -> None:
    found = set()
    for file in [*ROOT.glob("packages/*/src/**/*.py"), *ROOT.glob("plugins/*/src/**/*.py")]:
        text = file.read_text("utf-8")
        if "apply_chat_template(" in text or re.search(r"^\s*(import|from) jinja2", text, re.MULTILINE):
            found.add(file.relative_to(ROOT).as_posix())
    folder = "packages/d9d-weights/src/d9d_weights/templates"
    assert found == {f"{folder}/sandbox.py", f"{folder}/worker.py"}
