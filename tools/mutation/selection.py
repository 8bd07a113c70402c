"""Plugin of pytest: says to the recorder which test runs, or runs only the tests that a mutant is to meet.

Reads its orders from the environment, because it runs in the environment of the tests.
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

#: Directory of the records, while coverage is recorded.
RECORDS = "D9D_MUTATION_RECORDS"
#: File of the tests to run: test -> seconds that each may take.
PLAN = "D9D_MUTATION_PLAN"


def pytest_configure(config: pytest.Config) -> None:
    """Record, or keep to the plan."""
    if RECORDS in os.environ:
        config.pluginmanager.register(Recording(Path(os.environ[RECORDS])))
    if PLAN in os.environ:
        config.pluginmanager.register(Planned(Path(os.environ[PLAN])))


class Recording:
    """Record of tests: number, outcome and seconds of each.

    Lines that run outside of tests, and in fixtures of more than one test, count for all tests of the file: as test 0.
    """

    def __init__(self, directory: Path) -> None:
        self._tests: dict[str, dict[str, object]] = {}
        self._file = directory / "tests.json"
        self._current = os.open(directory / "current", os.O_WRONLY)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Number the test."""
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
        """Let what several tests share count for all of them."""
        if fixturedef.scope == "function":
            return (yield)
        self._say(0)
        try:
            return (yield)
        finally:
            self._say(len(self._tests))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the outcome."""
        test = self._tests[report.nodeid]
        test["passed"] = test["passed"] and not report.failed
        test["ran"] = test["ran"] or (report.when == "call" and report.passed)

    def _say(self, number: int) -> None:
        os.pwrite(self._current, str(number).ljust(16).encode(), 0)
        if sys.version_info >= (3, 12):
            sys.monitoring.restart_events()


class Planned:
    """Selection of tests, each with a limit in seconds, after which the process ends."""

    def __init__(self, plan: Path) -> None:
        self._limits: dict[str, float] = json.loads(plan.read_text())
        self._now = plan.with_suffix(".now")
        self._nowhere = os.open(os.devnull, os.O_WRONLY)

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Keep the tests of the plan."""
        others = [item for item in items if item.nodeid not in self._limits]
        items[:] = [item for item in items if item.nodeid in self._limits]
        config.hook.pytest_deselected(items=others)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """End the process when the test hangs."""
        self._now.write_text(item.nodeid)
        faulthandler.dump_traceback_later(self._limits[item.nodeid], exit=True, file=self._nowhere)
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()
