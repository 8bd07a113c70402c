"""Map from source lines to the tests that run them, recorded once for each test file."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandbox import ROOT, Sandbox
from slips import Slip


@dataclass(frozen=True)
class Test:
    """Test that passes on the unchanged sources.

    Attributes:
        name: pytest's name of the test.
        seconds: its recorded duration.
        thorough: whether it has the marker ``thorough``.
    """

    name: str
    seconds: float
    thorough: bool

    @property
    def file(self) -> str:
        """Path of the test file."""
        return self.name.split("::", 1)[0]


def test_files() -> list[str]:
    """All test files, slow ones first."""
    found = [*ROOT.glob("packages/*/tests/**/test_*.py"), *ROOT.glob("plugins/*/tests/**/test_*.py")]
    names = [str(file.relative_to(ROOT)) for file in [*ROOT.glob("tests/test_*.py"), *found]]
    return sorted(names, key=lambda name: (not name.startswith("tests/"), "d9d-engine" not in name, name))


def record(sandbox: Sandbox, file: str, limit: float) -> dict[str, Any]:
    """Run one test file; return its tests and the lines that they ran.

    Returns:
        ``tests``: name -> number and outcome; ``lines``: source -> line -> numbers of tests, where 0 stands
        for all tests of the file; ``status``: exit status of pytest, ``None`` if the time limit was reached.
    """
    directory = sandbox.directory / "r"
    directory.mkdir(exist_ok=True)
    (directory / "current").write_text("0".ljust(16))
    for name in ("lines", "tests.json"):
        (directory / name).unlink(missing_ok=True)
    environ = {"D9D_MUTATION_RECORDS": str(directory), "D9D_MUTATION_SOURCES": f"{sandbox.sources}/"}
    status, _ = sandbox.pytest([file], environ, limit)
    lines: dict[str, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    if (directory / "lines").exists():
        for row in (directory / "lines").read_text().splitlines():
            number, source, line = row.split("\t")
            lines[source][int(line)].add(int(number))
    tests = directory / "tests.json"
    return {
        "status": status,
        "tests": json.loads(tests.read_text()) if tests.exists() else {},
        "lines": {source: {line: sorted(of) for line, of in found.items()} for source, found in lines.items()},
    }


class CoverageMap:
    """Recorded tests of all test files.

    Args:
        path: gzipped JSON file, in the format of `write`.
    """

    def __init__(self, path: Path) -> None:
        self.files: dict[str, dict[str, Any]] = {}
        self._path = path
        if path.exists():
            self.files = json.loads(gzip.decompress(path.read_bytes()))

    def write(self) -> None:
        """Write the file, whole or not at all."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        new = self._path.with_name(f"{self._path.name}.new")
        new.write_bytes(gzip.compress(json.dumps(self.files, separators=(",", ":")).encode(), mtime=0))
        new.replace(self._path)

    def tests_of(self, slip: Slip) -> list[Test]:
        """Tests that run the statement of a slip; for one that runs at import, tests that run any line of its file."""
        source = "/".join(slip.file.split("/")[3:])
        result: list[Test] = []
        for found in self.files.values():
            lines: dict[str, list[int]] = found["lines"].get(source, {})
            if slip.top:
                numbers = {number for of in lines.values() for number in of}
            else:
                numbers = {number for line, of in lines.items() if _within(line, slip.lines) for number in of}
            if numbers:
                result += _passing(found["tests"], numbers)
        return result

    def ordered(self, slip: Slip, budget: float) -> tuple[list[Test], list[Test]]:
        """Tests of the slip's own member, and of other members, each up to a budget in seconds."""
        tests = self.tests_of(slip)
        near = [test for test in tests if test.file.startswith(slip.member + "/")]
        far = [test for test in tests if not test.file.startswith(slip.member + "/")]
        return _affordable(near, budget), _affordable(far, budget)


def _within(line: str, lines: tuple[int, int]) -> bool:
    return lines[0] <= int(line) <= lines[1]


def _passing(tests: dict[str, dict[str, Any]], numbers: set[int]) -> Iterable[Test]:
    for name, test in tests.items():
        if test["passed"] and test["ran"] and "seconds" in test and (0 in numbers or test["number"] in numbers):
            yield Test(name, test["seconds"], test["thorough"])


def _affordable(tests: list[Test], budget: float) -> list[Test]:
    """Tests within the budget, short ones first; ordered by file, short files first."""
    chosen: list[Test] = []
    for test in sorted(tests, key=lambda test: (test.thorough, test.seconds)):
        budget -= test.seconds
        # At least one test is always run.
        if budget < 0 and chosen:
            break
        chosen.append(test)
    seconds: dict[str, float] = defaultdict(float)
    for test in chosen:
        seconds[test.file] += test.seconds
    return sorted(chosen, key=lambda test: (seconds[test.file], test.file))
