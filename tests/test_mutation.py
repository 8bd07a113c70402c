"""Slips that the mutation campaign seeds, and the tests it lets them meet."""

from __future__ import annotations

import ast
import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.tools

TOOLS = Path(__file__).resolve().parents[1] / "tools" / "mutation"
SOURCE = '''"""Doc 1."""
LIMIT = 3


def mean(rows, mask, scale: int = 1) -> float:
    """Mean of 2 rows."""
    if rows is None and scale < 2:
        raise ValueError("not 1")
    total = (rows * mask).sum(0, 1)
    mean.count += 1
    print(place(total, scale))
    return [row for row in rows[1:] if row][-1]
'''
CHANGES = {
    (2, "off by one", "3 -> 4"),
    (5, "off by one", "1 -> 2"),
    (7, "negated condition", "rows is None and scale < 2 -> (not (rows is None and scale < 2))"),
    (7, "ignored mask", "rows is None and scale < 2 -> (rows is None)"),
    (7, "flipped comparison", "scale < 2 -> (scale <= 2)"),
    (8, "dropped line", 'raise ValueError("not 1") -> pass'),
    (9, "ignored mask", "rows * mask -> rows"),
    (9, "wrong sign", "rows * mask -> (rows / mask)"),
    (9, "average for sum", "(rows * mask).sum -> (rows * mask).mean"),
    (9, "swapped arguments", "(rows * mask).sum(0, 1) -> (rows * mask).sum(1, 0)"),
    (10, "dropped line", "mean.count += 1 -> pass"),
    (11, "swapped arguments", "place(total, scale) -> place(scale, total)"),
    (12, "ignored mask", "[row for row in rows[1:] if row] -> [row for row in rows[1:]]"),
    (12, "off by one", "rows[1:] -> rows[1 + 1:]"),
    (12, "wrong sign", "-1 -> 1"),
}


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module(name)


def slips_of(directory: Path, monkeypatch: pytest.MonkeyPatch, text: str = SOURCE) -> list[Any]:
    file = directory / "packages" / "d9d-x" / "src" / "d9d_x" / "mean.py"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    found: list[Any] = load("slips", monkeypatch).slips_of(directory, file)
    return found


def test_every_kind_of_slip_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {(slip.line, slip.kind, slip.change) for slip in slips_of(tmp_path, monkeypatch)}
    assert found >= CHANGES, CHANGES - found
    assert not [change for line, _, change in found if line in (1, 6)], "a docstring was changed"
    assert (8, "off by one") not in {(line, kind) for line, kind, _ in found}


@pytest.mark.parametrize(
    "line",
    [
        "generator.manual_seed(1)",
        "dtype = torch.promote_types(query.dtype, key.dtype)",
        "values = draw(seed=0)",
        "with suppress(OSError, ValueError): run()",
    ],
)
def test_changes_without_an_effect_are_left_out(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {slip.kind for slip in slips_of(tmp_path, monkeypatch, f"{line}\n")} <= {"dropped line"}


def test_a_slip_changes_its_own_stretch_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for slip in slips_of(tmp_path, monkeypatch, SOURCE.replace("Doc", "Müller")):
        source = SOURCE.replace("Doc", "Müller")
        changed = slip.applied(source.encode()).decode()
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source))
        before, after = source.splitlines(), changed.splitlines()
        assert [row for row, (a, b) in enumerate(zip(before, after, strict=True), 1) if a != b] == [slip.line]


def test_the_tests_of_a_slip_are_those_that_run_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slips = slips_of(tmp_path, monkeypatch)
    tests = {
        f"{file}::{name}": {
            "number": number,
            "passed": name != "broken",
            "ran": True,
            "seconds": 1.0,
            "thorough": False,
        }
        for file in ("tests/test_far.py",)
        for number, name in enumerate(("first", "second", "broken"), 1)
    }
    near = {"packages/d9d-x/tests/test_near.py::only": next(iter(tests.values()))}
    known = load("coverage_map", monkeypatch).CoverageMap(tmp_path / "map.json.gz")
    known.files["tests/test_far.py"] = {"tests": tests, "lines": {"d9d_x/mean.py": {"2": [0], "9": [1, 3], "10": [2]}}}
    known.files["packages/d9d-x/tests/test_near.py"] = {"tests": near, "lines": {"d9d_x/mean.py": {"9": [0]}}}
    known.write()
    read = type(known)(tmp_path / "map.json.gz")
    assert json.loads(json.dumps(known.files)) == read.files

    def names(line: int, budget: float = 60.0) -> list[list[str]]:
        slip = next(slip for slip in slips if slip.line == line)
        return [[test.name.split("::")[1] for test in group] for group in read.ordered(slip, budget)]

    assert names(9) == [["only"], ["first"]]
    assert names(10) == [[], ["second"]]
    assert names(11) == [[], []]
    # What runs at import changes what any function does.
    assert names(2) == [["only"], ["first", "second"]]
    assert names(2, budget=1.0) == [["only"], ["first"]]


def test_slips_with_equal_results_are_counted_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = [("a", "killed"), ("b", "survived"), ("c", "survived"), ("d", "unreached")]
    rows = [{"member": "packages/d9d-nn", "key": key, "verdict": verdict, "far": False} for key, verdict in outcomes]
    table = load("mutation_report", monkeypatch).table(rows, {"b": "equal results: no caller", "c": "noticed since"})
    assert "| d9d-nn | 4 | 1 | 1 | 25.0 | 1 | 33.3 |" in table.splitlines()
    assert table.splitlines()[-1] == "| all | 4 | 1 | 1 | 25.0 | 1 | 33.3 |"
