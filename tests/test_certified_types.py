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
from d9d_core.registry.loader import discover
from d9d_core.registry.policy import PluginPolicy
from d9d_core.registry.registry import Registry
from d9d_verify.certify.run import LAYOUTS, certify

ROOT = Path(__file__).resolve().parents[1]
DATA: dict[str, Any] = json.loads((ROOT / "docs" / "certificates.json").read_text())
#: One layout of each axis; the page has all of them.
SOME = [layout for layout in LAYOUTS if layout.name in ("fsdp 2", "pp 2", "tp 2", "cp 2", "ep 2")]


def test_the_page_is_made_from_its_data(tool: Callable[[str], ModuleType]) -> None:
    assert (ROOT / "docs" / "certificates.md").read_text() == tool("certificates").page(DATA)


def test_the_page_is_of_the_locked_release() -> None:
    locked = re.search(r'name = "transformers"\nversion = "([^"]+)"', (ROOT / "uv.lock").read_text())
    assert locked is not None
    for table in ("types", "families"):
        assert DATA[table]["versions"]["transformers"] == locked[1]
    assert len(DATA["types"]["rows"]) >= 100


def test_the_page_has_every_family(tool: Callable[[str], ModuleType]) -> None:
    found = tool("certificates").families(discover(PluginPolicy()))
    assert sorted(row["type"] for row in DATA["families"]["rows"]) == found
    assert all(row["cells"] and not row["refused"] for row in DATA["families"]["rows"])


def test_most_cells_are_exact_and_none_differs_silently() -> None:
    rows = [*DATA["types"]["rows"], *DATA["families"]["rows"]]
    cells = [standing for row in rows for standing, _ in row["cells"].values() if standing != "not applicable"]
    assert cells.count("exact") >= 0.8 * len(cells)
    assert all(row["refused"] or row["cells"] for row in rows)


@pytest.mark.full
def test_a_type_of_the_day_is_as_the_page_says(tool: Callable[[str], ModuleType]) -> None:
    rows = [row for row in DATA["types"]["rows"] if row["cells"] and "differs" not in dict(row["cells"].values())]
    built = {row["type"]: row["cells"] for row in rows}
    seed = date.today().toordinal()
    kind = random.Random(seed).choice(sorted(built))
    print(f"type of seed {seed}: {kind}")
    found = certify(kind, Registry.of(*tool("certificates").PLUGINS), print, SOME, lora=False)
    standings = {cell.name: cell.standing for cell in found.cells}
    assert standings == {name: built[kind][name][0] for name in standings}, (seed, kind)
