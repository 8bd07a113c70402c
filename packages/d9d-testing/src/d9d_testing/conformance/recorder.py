"""Pytest plugin that records the outcome of each test of a conformance suite in a JSON file.

python -m pytest -p d9d_testing.conformance.recorder --conformance-record FILE ...
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from d9d_testing.conformance.suites import kind_of


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that names the JSON file."""
    parser.addoption("--conformance-record", type=Path, required=True, help="JSON file to write.")


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker ``gpu``, and start recording."""
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
    config.pluginmanager.register(Recorder(config.getoption("--conformance-record")), "conformance-recorder")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests with the marker ``gpu`` on a machine without a CUDA device."""
    if item.get_closest_marker("gpu") is None:
        return
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


class Recorder:
    """Outcomes of tests, and errors of collection; written when the session ends."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._classes: dict[str, dict[str, Any]] = {}
        self._tests: dict[str, dict[str, Any]] = {}
        self._errors: list[str] = []

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Note the component that each test is about, by the attributes of its class."""
        for item in items:
            suite = getattr(item, "cls", None) or object
            self._classes[item.nodeid] = {
                "kind": kind_of(suite),
                "plugin": getattr(suite, "plugin", None),
                "target": getattr(suite, "target", None),
                "suite": suite.__name__,
                "test": item.name,
            }

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note an error of collection, such as a module that fails to load."""
        if report.failed:
            self._errors.append(f"{report.nodeid}: {_last_line(report.longreprtext)}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note an outcome; a test whose set-up or teardown fails has failed."""
        test = self._tests.setdefault(report.nodeid, {**self._classes[report.nodeid], "outcome": "passed"})
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            test |= {"outcome": "failed", "message": getattr(crash, "message", None) or _last_line(report.longreprtext)}
        elif report.skipped and test["outcome"] == "passed":
            test["outcome"] = "skipped"

    def pytest_sessionfinish(self) -> None:
        """Write all outcomes to the JSON file."""
        self._file.write_text(json.dumps({"tests": [*self._tests.values()], "errors": self._errors}), "utf-8")


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]
