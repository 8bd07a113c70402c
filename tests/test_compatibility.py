"""The table of compatibility: it equals its records, shows cells that did not run, and says why one cannot run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The tool, with page and records in a temporary directory."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import compatibility

    monkeypatch.setattr(compatibility, "PAGE", tmp_path / "compatibility.md")
    monkeypatch.setattr(compatibility, "RECORDS", tmp_path / "compatibility.json")
    return compatibility


def test_the_page_is_up_to_date() -> None:
    command = [sys.executable, "tools/compatibility.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_axis_has_its_oldest_and_its_newest_version(tool: Any) -> None:
    names = [cell.name for cell in tool.CELLS]
    assert names[0] == "locked"
    for axis in ("torch", "transformers", "core"):
        for which in ("oldest", "newest"):
            (cell,) = (cell for cell in tool.CELLS if cell.name == f"{axis}-{which}")
            assert getattr(cell, axis) == which
    assert tool.oldest("torch") == "2.11"
    assert tool.oldest("transformers") == "5.17"


def test_one_cell_runs_and_the_others_stay(tool: Any, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    ran = []

    def run(cell: Any) -> Any:
        ran.append(cell.name)
        versions = {"python": "3.11.7", "torch": "2.11.0", "transformers": "5.23.0", "d9d-core": "0.1.0"}
        return tool.Record("2026-01-02", versions, passed=1234, failed=len(ran) - 1)

    monkeypatch.setattr(tool, "run_cell", run)
    assert tool.main(["--only", "torch-oldest"]) == 0
    assert tool.main(["--only", "locked"]) == 1, "tests of the second cell fail"
    assert ran == ["torch-oldest", "locked"]
    rows = tool.PAGE.read_text().splitlines()
    assert "| `torch-oldest` | 2.11.0 | 5.23.0 | 0.1.0 | 3.11.7 | 1,234 passed | 2026-01-02 |" in rows
    assert "| `locked` | 2.11.0 | 5.23.0 | 0.1.0 | 3.11.7 | 1,234 passed, **1 failed** | 2026-01-02 |" in rows
    assert "| `torch-newest` | newest | locked | locked |  | not run |  |" in rows
    assert tool.main(["--check"]) == 0
    tool.PAGE.write_text("")
    assert tool.main(["--check"]) == 1


def test_a_cell_that_cannot_be_installed_says_so(tool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def call(command: Sequence[str], *, capture: bool = False) -> Any:
        fails = command[:3] == ["uv", "pip", "install"]
        return subprocess.CompletedProcess(
            command, int(fails), "", "x\n  no version of torch==2.11.*\n" if fails else ""
        )

    monkeypatch.setattr(tool, "_call", call)
    assert tool.main(["--only", "torch-oldest"]) == 0
    record = json.loads(tool.RECORDS.read_text())["torch-oldest"]
    assert record["reason"] == "x no version of torch==2.11.*"
    assert "| not possible: x no version of torch==2.11.* |" in tool.PAGE.read_text()


def test_requirements_follow_the_axes(tool: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[list[str]] = []

    def call(command: Sequence[str], *, capture: bool = False) -> Any:
        calls.append(list(command))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(tool, "_call", call)
    tool.install(tool.Cell("x", torch="oldest"), tmp_path, tmp_path / "python")
    _, export, pip = calls
    assert "torch==2.11.*" in pip
    assert "transformers" in pip
    assert str(ROOT / "packages" / "d9d-core") in pip
    assert export[export.index("--prune") + 1] == "torch"
    calls.clear()
    monkeypatch.setattr(tool, "released", lambda which: {"oldest": "0.1.0", "newest": "0.3.0"}[which])
    tool.install(tool.Cell("x", core="newest"), tmp_path, tmp_path / "python")
    assert "d9d-core==0.3.0" in calls[2]
    assert "--editable" not in calls[2]
    assert str(ROOT / "examples" / "d9d-hello") in calls[2]


def test_releases_are_read_from_the_changelog(tool: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    file = tmp_path / "CHANGELOG.md"
    file.write_text("# Changelog\n\n## 0.3.0 (not released yet)\n\n## 0.2.0\n\n## 0.1.0 - 2026-12-01\n")
    assert (tool.released("oldest"), tool.released("newest")) == ("0.1.0", "0.2.0")
    file.write_text("## 0.1.0 (not released yet)\n")
    with pytest.raises(tool.CellError, match="no release of d9d-core yet"):
        tool.released("newest")
