"""Pytest plugin that tells the recorder the running test, or runs only the planned tests for a mutant.

Configured through environment variables, because it runs inside the tests' environment.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
from collections.abc import Generator
from pathlib import Path

import pytest

#: Environment variable with the directory of the records, while coverage is recorded.
RECORDS = "D9D_MUTATION_RECORDS"
#: Environment variable with the file of the planned tests: test -> limit in seconds.
PLAN = "D9D_MUTATION_PLAN"


def pytest_configure(config: pytest.Config) -> None:
    """Register the recording, or the selection of the plan."""
    if RECORDS in os.environ:
        config.pluginmanager.register(Recording(Path(os.environ[RECORDS])))
    if PLAN in os.environ:
        config.pluginmanager.register(Planned(Path(os.environ[PLAN])))


class Recording:
    """Recorder of tests: number, outcome and seconds of each test.

    Lines that run outside of tests, or in fixtures of several tests, are assigned to number 0: all tests of the file.
    """

    def __init__(self, directory: Path) -> None:
        self._tests: dict[str, dict[str, object]] = {}
        self._file = directory / "tests.json"
        self._current = os.open(directory / "current", os.O_WRONLY)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Assign the next number to the test."""
        began, number = time.perf_counter(), len(self._tests) + 1
        thorough = item.get_closest_marker("thorough") is not None
        test = self._tests[item.nodeid] = {"number": number, "passed": True, "ran": False, "thorough": thorough}
        self._say(number)
        try:
            return (yield)
        finally:
            self._say(0)
            test["seconds"] = time.perf_counter() - began
            self._file.write_text(json.dumps(self._tests))

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[object]) -> Generator[None, object, object]:
        """Assign lines of shared fixtures to all tests."""
        if fixturedef.scope == "function":
            return (yield)
        self._say(0)
        try:
            return (yield)
        finally:
            self._say(len(self._tests))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record the outcome of a test."""
        test = self._tests[report.nodeid]
        test["passed"] = test["passed"] and not report.failed
        test["ran"] = test["ran"] or (report.when == "call" and report.passed)

    def _say(self, number: int) -> None:
        os.pwrite(self._current, str(number).ljust(16).encode(), 0)
        if sys.version_info >= (3, 12):
            sys.monitoring.restart_events()


class Planned:
    """Selection of the planned tests; the process ends if a test exceeds its limit in seconds."""

    def __init__(self, plan: Path) -> None:
        self._limits: dict[str, float] = json.loads(plan.read_text())
        self._now = plan.with_suffix(".now")
        self._nowhere = os.open(os.devnull, os.O_WRONLY)

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Select the tests of the plan."""
        others = [item for item in items if item.nodeid not in self._limits]
        items[:] = [item for item in items if item.nodeid in self._limits]
        config.hook.pytest_deselected(items=others)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """End the process if the test exceeds its limit."""
        self._now.write_text(item.nodeid)
        faulthandler.dump_traceback_later(self._limits[item.nodeid], exit=True, file=self._nowhere)
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()
