"""Runs the conformance suites of an installed distribution in new processes with pytest."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, Literal

from d9d_core.errors import PluginError
from d9d_core.registry.entries import Entry
from d9d_core.registry.registry import Registry

from d9d_testing.conformance.suites import DECLARATIONS, GROUP, SUITES, written

#: Exit statuses of pytest: all passed, some failed, no tests.
_ENDS = (0, 1, 5)
Verdict = Literal["passed", "failed", "missing", "declarations"]


@dataclass(frozen=True, slots=True)
class Row:
    """Outcome of the suites of one component.

    Attributes:
        kind: kind of the component, or ``declarations`` for a whole declaration module.
        name: name of the component, or the declaration module.
        suites: names of the test classes.
        passed: number of tests that passed.
        failed: number of tests that failed.
        skipped: number of skipped tests.
        problem: first failure, or the reason why no test ran; empty if all is well.
    """

    kind: str
    name: str
    suites: tuple[str, ...] = ()
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    problem: str = ""

    @property
    def verdict(self) -> Verdict:
        """``missing`` if no test ran; ``declarations`` for a kind of which only the declarations can be tested."""
        if self.failed:
            return "failed"
        if self.kind not in SUITES:
            return "declarations"
        return "missing" if self.problem else "passed"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of all suites of a distribution.

    Attributes:
        name: normalised name of the distribution.
        version: its version.
        rows: one row per declaration module, then one per component.
        errors: errors of collection, such as a module of suites that fails to load, early ends of pytest, and failed
            tests about no component of the distribution.
    """

    name: str
    version: str
    rows: Sequence[Row]
    errors: Sequence[str] = ()

    @property
    def passed(self) -> bool:
        """Whether no error occurred, no test failed, and tests ran for every component of a kind with a suite."""
        return not self.errors and all(row.verdict in ("passed", "declarations") for row in self.rows)

    def count(self, outcome: Literal["passed", "failed", "skipped"]) -> int:
        """Number of tests with this outcome."""
        return sum(getattr(row, outcome) for row in self.rows)


def conform(registry: Registry, name: str, files: Sequence[Path] = ()) -> Outcome:
    """Run the conformance suites of a distribution.

    The distribution's own suites and those in ``files`` run first, then generated suites for the other components.

    Args:
        registry: records of the installed plugins.
        name: name of the distribution.
        files: further test files or directories with suites of the distribution.

    Raises:
        PluginError: no loaded plugin has this name, or it cannot be loaded.
    """
    for problem in registry.problems:
        if problem.origin.is_called(name):
            raise PluginError(f"plugin {problem}; correct this first: d9d plugins check {name}")
    origins = [origin for origin in registry.plugins if origin.is_called(name)]
    if not origins:
        known = ", ".join(sorted({origin.distribution for origin in registry.plugins}))
        raise PluginError(f"no plugin '{name}' is loaded; install it, or choose from: {known}")
    modules = [origin.module for origin in origins]
    entries = [entry for entry in registry.entries() if entry.origin.module in modules]
    with tempfile.TemporaryDirectory(prefix="d9d-conform-") as directory:
        place = Path(directory)
        shipped = _shipped(origins[0].distribution)
        tests, errors = _run([*map(str, files), *shipped], place) if files or shipped else ([], [])
        components = {(DECLARATIONS, module) for module in modules}
        components |= {(entry.kind.name, entry.spec.key) for entry in entries}
        covered = {_about(test) for test in tests} & components
        # Tests about no component of the distribution have no row, but a failure counts.
        errors += [_failure(test) for test in tests if test["outcome"] == "failed" and _about(test) not in components]
        others = [origin.module for origin in registry.plugins if origin.module not in modules]
        missing = [module for module in modules if (DECLARATIONS, module) not in covered]
        rest = [entry for entry in entries if (entry.kind.name, entry.spec.key) not in covered]
        if source := written(missing, rest, others):
            file = place / "test_written.py"
            file.write_text(source, "utf-8")
            more, failures = _run([str(file)], place)
            tests, errors = [*tests, *more], [*errors, *failures]
    return Outcome(origins[0].distribution, origins[0].version, _rows(modules, entries, tests), errors)


def _shipped(name: str) -> list[str]:
    try:
        points = distribution(name).entry_points.select(group=GROUP)
    except PackageNotFoundError:
        return []
    return sorted({point.module for point in points})


def _run(tests: Sequence[str], place: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Run pytest in a new process, without settings of the user or of surrounding projects; return tests, errors."""
    settings, record = place / "pytest.ini", place / "record.json"
    settings.write_text("[pytest]\n", "utf-8")
    record.unlink(missing_ok=True)
    options = ["-q", "--no-header", "--tb=short", "-c", str(settings), "--rootdir", str(place)]
    options += ["-p", "no:cacheprovider", "-p", "d9d_testing.conformance.recorder", "--conformance-record", str(record)]
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS")}
    command = [sys.executable, "-m", "pytest", *options, "--import-mode=importlib", "--pyargs", *tests]
    status = subprocess.run(command, check=False, env=environ).returncode  # noqa: S603 - our own command
    try:
        found = json.loads(record.read_text("utf-8"))
    except OSError:
        return [], [f"pytest ended with status {status} and wrote no record; its output stands above"]
    errors = list(found["errors"])
    if status not in _ENDS and not errors:
        errors.append(f"pytest ended with status {status} before all tests ran; its output stands above")
    return found["tests"], errors


def _about(test: Mapping[str, Any]) -> tuple[str | None, str]:
    """Kind and name of the component that a test is about."""
    return test["kind"], _target(test)


def _failure(test: Mapping[str, Any]) -> str:
    return f"{test['test']}: {(test['message'].splitlines() or [''])[0]}"


def _target(test: Mapping[str, Any]) -> str:
    """Name of the component that a test is about; a declaration module for the suite of declarations."""
    if test["kind"] == DECLARATIONS:
        return str(test["plugin"])
    return str(test["target"]).rpartition("/")[2]


def _rows(modules: Collection[str], entries: Sequence[Entry], tests: Sequence[Mapping[str, Any]]) -> list[Row]:
    rows = [_row(DECLARATIONS, module, tests) for module in modules]
    return rows + [_row(entry.kind.name, entry.spec.key, tests) for entry in entries]


def _row(kind: str, name: str, tests: Sequence[Mapping[str, Any]]) -> Row:
    own = [test for test in tests if _about(test) == (kind, name)]
    counts = {word: sum(test["outcome"] == word for test in own) for word in ("passed", "failed", "skipped")}
    failures = [test for test in own if test["outcome"] == "failed"]
    problem = _failure(failures[0]) if failures else ""
    if kind in SUITES and not counts["passed"] + counts["failed"]:
        problem = "all tests were skipped" if counts["skipped"] else _missing(kind)
    return Row(kind, name, tuple(dict.fromkeys(test["suite"] for test in own)), problem=problem, **counts)


def _missing(kind: str) -> str:
    module, _, name = SUITES[kind].target.partition(":")
    needs = f" with {SUITES[kind].facts}" if SUITES[kind].facts else ""
    return f"write a subclass of {name} ({module}){needs} in a module that an entry point of '{GROUP}' names"
