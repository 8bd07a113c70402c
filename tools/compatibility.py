"""Runs smoke tests over the oldest, the locked and the newest torch, transformers and d9d-core, and writes the table.

    uv run python tools/compatibility.py                         run all cells, write docs/compatibility.md
    uv run python tools/compatibility.py --only torch-oldest     run one cell; may be repeated
    uv run python tools/compatibility.py --check                 exit with 1 if the page differs from the records

A cell is a new environment, .venv-compatibility/CELL, in which one axis differs from uv.lock, or both libraries do.
Records are kept in docs/compatibility.json; the page shows a cell without a record as not run. Cells of torch run the
smoke tests of all members, as .ci/run does with the oldest torch; cells of transformers run the tests of
d9d-transformers; cells of d9d-core install a release and run the conformance suites of the plugins under examples/.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE, RECORDS = ROOT / "docs" / "compatibility.md", ROOT / "docs" / "compatibility.json"
HEAD = """# Compatibility

Smoke tests with the oldest supported, the locked and the newest torch, transformers and d9d-core. In each row, the
named axis differs from the versions of `uv.lock`. `uv run python tools/compatibility.py --only CELL` runs a row again.

<!-- written by tools/compatibility.py -->
"""
_QUICK = "not thorough and not full and not tools and not slow and not gpu"
_SMOKE = f"smoke and {_QUICK}"
#: Packages of the environments in addition to the members.
_TOOLS = ("hypothesis", "matplotlib", "pytest", "pytest-xdist")
#: Settings of another environment that would decide which tests run; .ci/environment unsets the same ones.
_UNSET = (
    "VIRTUAL_ENV", "UV_PYTHON", "UV_PROJECT", "UV_PROJECT_ENVIRONMENT", "UV_FROZEN", "UV_LOCKED", "UV_NO_SYNC",
    "PYTHONPATH", "PYTEST_ADDOPTS", "D9D_PLUGINS", "PYTHONDONTWRITEBYTECODE",
)  # fmt: skip
_AXES = ("torch", "transformers", "core")


class CellError(Exception):
    """A cell cannot be installed; the text is the reason."""


@dataclass(frozen=True)
class Cell:
    """Row of the table.

    Attributes:
        name: name for ``--only``.
        torch: ``oldest``, ``locked`` or ``newest``.
        transformers: likewise.
        core: likewise; ``locked`` is this checkout.
    """

    name: str
    torch: str = "locked"
    transformers: str = "locked"
    core: str = "locked"


CELLS = (
    Cell("locked"),
    *(Cell(f"{axis}-{which}", **{axis: which}) for axis in _AXES for which in ("oldest", "newest")),
    *(Cell(f"libraries-{which}", torch=which, transformers=which) for which in ("oldest", "newest")),
)


@dataclass(frozen=True)
class Record:
    """Outcome of a cell.

    Attributes:
        date: day of the run.
        versions: distribution or ``python`` -> version.
        passed: number of tests that passed.
        failed: number of tests that failed.
        reason: why the cell could not be installed or its tests not run; empty if they ran.
    """

    date: str
    versions: Mapping[str, str]
    passed: int = 0
    failed: int = 0
    reason: str = ""

    @property
    def outcome(self) -> str:
        """Outcome in words."""
        if self.reason:
            return f"not possible: {self.reason}"
        return f"{self.passed:,} passed" + (f", **{self.failed:,} failed**" if self.failed else "")


def run_cell(cell: Cell) -> Record:
    """Install a cell and run its tests."""
    today = datetime.now(UTC).date().isoformat()
    place = ROOT / ".venv-compatibility" / cell.name
    python = place / "bin" / "python"
    try:
        install(cell, place, python)
    except CellError as error:
        return Record(today, {}, reason=str(error))
    versions = _versions(python)
    if cell.core != "locked":
        return _conformance(place, today, versions)
    tests = ["packages", "plugins", "tests/test_end_to_end.py"]
    marks = _SMOKE
    if cell.torch == "locked" and cell.transformers != "locked":
        names = ("families", "containers", "bad_configs")
        tests, marks = [f"plugins/d9d-transformers/tests/test_{name}.py" for name in names], _QUICK
    report = place / "report.xml"
    command = [str(python), "-m", "pytest", "-q", "-n", "auto", "--dist", "loadfile", "-m", marks]
    status = _call([*command, "--junit-xml", str(report), *tests]).returncode
    suite = ET.parse(report).getroot().find("testsuite") if report.exists() else None  # noqa: S314 - our own file
    if suite is None:
        return Record(today, versions, reason=f"pytest ended with status {status} and wrote no report")
    tests_run, skipped = int(suite.get("tests", 0)), int(suite.get("skipped", 0))
    failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    return Record(today, versions, tests_run - skipped - failed, failed)


def install(cell: Cell, place: Path, python: Path) -> None:
    """Create the environment of a cell.

    Raises:
        CellError: a version does not exist, or does not fit the others.
    """
    requirements = [*_TOOLS, *(_requirement(axis, getattr(cell, axis)) for axis in ("torch", "transformers"))]
    if cell.core == "locked":
        members = [
            file.parent for house in ("packages", "plugins") for file in sorted(ROOT.glob(f"{house}/*/pyproject.toml"))
        ]
        requirements += [word for member in members for word in ("--editable", str(member))]
    else:
        version = released(cell.core)
        requirements += [f"{name}=={version}" for name in ("d9d-core", "d9d-inference", "d9d-pipeline", "d9d-testing")]
        requirements += [str(file.parent) for file in sorted(ROOT.glob("examples/*/pyproject.toml"))]
    _install(["uv", "venv", "--quiet", "--clear", str(place)])
    pins = place / "pins.txt"
    prune = [word for axis in ("torch", "transformers") if getattr(cell, axis) != "locked" for word in _pruned(axis)]
    export = ["uv", "export", "--quiet", "--no-hashes", "--no-emit-workspace", "--all-groups", *prune]
    _install([*export, "--output-file", str(pins)])
    pip = ["uv", "pip", "install", "--quiet", "--python", str(python), "--constraint", str(pins)]
    _install([*pip, *requirements])


def released(which: str) -> str:
    """Oldest or newest release of d9d, from the headings of CHANGELOG.md.

    Raises:
        CellError: nothing is released yet.
    """
    headings = re.findall(r"^## (\d+\.\d+\.\d+)(.*)$", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    versions = [version for version, note in headings if "not released" not in note]
    if not versions:
        raise CellError("no release of d9d-core yet")
    return str(versions[-1 if which == "oldest" else 0])


def oldest(axis: str) -> str:
    """Oldest version of a library that the members admit, such as ``2.11``."""
    member = {"torch": "packages/d9d-engine", "transformers": "plugins/d9d-transformers"}[axis]
    needs = tomllib.loads((ROOT / member / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"]
    (found,) = (match[1] for need in needs if (match := re.match(rf"{axis}>=([0-9.]+)", need)))
    return str(found)


def _requirement(axis: str, which: str) -> str:
    return f"{axis}=={oldest(axis)}.*" if which == "oldest" else axis


def _pruned(axis: str) -> list[str]:
    """Options that leave a library, and pins that another version of it may contradict, out of the constraints."""
    if axis == "torch":
        return ["--prune", "torch", "--no-emit-package", "setuptools", "--no-emit-package", "triton"]
    return ["--prune", "transformers", "--prune", "huggingface-hub"]


def _install(command: Sequence[str]) -> None:
    done = _call(command, capture=True)
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        raise CellError(" ".join(lines)[-300:] or f"{command[0]} ended with status {done.returncode}")


def _call(command: Sequence[str], *, capture: bool = False) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if name not in _UNSET}
    environ["OMP_WAIT_POLICY"] = "PASSIVE"  # threads that spin while they wait slow down the other processes
    return subprocess.run(command, cwd=ROOT, env=environ, capture_output=capture, text=True, check=False)


def _versions(python: Path) -> dict[str, str]:
    code = (
        "import json, platform; from importlib.metadata import version; "
        "print(json.dumps({'python': platform.python_version(), "
        "**{name: version(name) for name in ('torch', 'transformers', 'd9d-core')}}))"
    )
    found: dict[str, str] = json.loads(_call([str(python), "-c", code], capture=True).stdout)
    return found


def _conformance(place: Path, today: str, versions: Mapping[str, str]) -> Record:
    """Outcome of the conformance suites of all example plugins."""
    passed = failed = 0
    for file in sorted(ROOT.glob("examples/*/pyproject.toml")):
        badge = place / "badges" / file.parent.name
        _call([str(place / "bin" / "d9d"), "plugins", "conform", file.parent.name, "--badge", str(badge)])
        if not (badge / "conformance.json").exists():
            return Record(today, versions, reason=f"d9d plugins conform {file.parent.name} wrote no badge")
        facts = json.loads((badge / "conformance.json").read_text("utf-8"))
        passed, failed = passed + facts["passed"], failed + facts["failed"] + len(facts["errors"])
    return Record(today, versions, passed, failed)


def records() -> dict[str, Record]:
    """Kept records by the name of the cell."""
    found: dict[str, Any] = json.loads(RECORDS.read_text("utf-8")) if RECORDS.exists() else {}
    return {name: Record(**record) for name, record in found.items()}


def page(kept: Mapping[str, Record]) -> str:
    """Content of the page."""
    rows = ["| cell | torch | transformers | d9d-core | Python | outcome | date |", "|---|---|---|---|---|---|---|"]
    for cell in CELLS:
        record = kept.get(cell.name)
        asked = {"torch": cell.torch, "transformers": cell.transformers, "d9d-core": cell.core}
        versions = record.versions if record else {}
        cells = [f"`{cell.name}`", *(versions.get(name, which) for name, which in asked.items())]
        cells += [versions.get("python", ""), record.outcome if record else "not run", record.date if record else ""]
        rows.append(f"| {' | '.join(text.replace('|', ' ') for text in cells)} |")
    return "\n".join([HEAD, *rows, ""])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run cells and write the page, or check the page. Exit status 1 if tests failed or the page is out of date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=[cell.name for cell in CELLS], help="cell to run")
    parser.add_argument("--check", action="store_true", help="only compare the page with the records")
    chosen = parser.parse_args(arguments)
    kept = records()
    if chosen.check:
        if PAGE.exists() and PAGE.read_text("utf-8") == page(kept):
            return 0
        print(f"{PAGE.name} is out of date; run: uv run python tools/compatibility.py --only CELL", file=sys.stderr)
        return 1
    ran = [cell for cell in CELLS if not chosen.only or cell.name in chosen.only]
    for cell in ran:
        kept[cell.name] = run_cell(cell)
        print(f"{cell.name}: {kept[cell.name].outcome}", flush=True)
        # After each cell, so that an interrupted campaign keeps its results.
        values = {name: asdict(record) for name, record in sorted(kept.items())}
        RECORDS.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8", newline="\n")
        PAGE.write_text(page(kept), encoding="utf-8", newline="\n")
    return int(any(kept[cell.name].failed or "pytest" in kept[cell.name].reason for cell in ran))


if __name__ == "__main__":
    sys.exit(main())
