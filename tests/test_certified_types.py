"""The page of certificates, and types of transformers that are drawn anew each day."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from datetime import date
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from d9d_core.registry.registry import Registry
from d9d_verify.certify.run import LAYOUTS, certify

ROOT = Path(__file__).resolve().parents[1]
DATA: dict[str, Any] = json.loads((ROOT / "docs" / "certificates.json").read_text())
#: One layout of each axis; the page has all of them.
SOME = [layout for layout in LAYOUTS if layout.name in ("fsdp 2", "pp 2", "tp 2", "cp 2", "ep 2")]
#: Types of a day; the page has all.
COUNT = 2


def test_the_page_is_made_from_its_data(tool: Callable[[str], ModuleType]) -> None:
    assert (ROOT / "docs" / "certificates.md").read_text() == tool("certificates").page(DATA)


def test_the_page_is_of_the_locked_release() -> None:
    locked = re.search(r'name = "transformers"\nversion = "([^"]+)"', (ROOT / "uv.lock").read_text())
    assert locked is not None
    assert DATA["versions"]["transformers"] == locked[1]
    assert len(DATA["rows"]) >= 100


def test_most_cells_are_exact_and_none_differs_silently() -> None:
    cells = [standing for row in DATA["rows"] for standing, _ in row["cells"].values() if standing != "not applicable"]
    assert cells.count("exact") >= 0.8 * len(cells)
    assert all(row["refused"] or row["cells"] for row in DATA["rows"])


@pytest.mark.thorough
@pytest.mark.parametrize("number", range(COUNT))
def test_types_of_the_day_are_as_the_page_says(tool: Callable[[str], ModuleType], number: int) -> None:
    rows = [row for row in DATA["rows"] if row["cells"] and "differs" not in dict(row["cells"].values())]
    built = {row["type"]: row["cells"] for row in rows}
    seed = date.today().toordinal()
    kind = random.Random(seed).sample(sorted(built), COUNT)[number]
    print(f"type {number} of seed {seed}: {kind}")
    found = certify(kind, Registry.of(*tool("certificates").PLUGINS), print, SOME, lora=False)
    standings = {cell.name: cell.standing for cell in found.cells}
    assert standings == {name: built[kind][name][0] for name in standings}, (seed, kind)
