"""Records of conformance runs: outcomes of tests, and classes for components whose author ships no suite."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from d9d_core.registry.registry import Registry
from d9d_testing.conformance.recorder import Recorder
from d9d_testing.conformance.suites import SUITES, kind_of, written
from d9d_testing.suites.lr_schedule import LrScheduleSuite
from d9d_testing.toy import plugin as toy


class Mine(LrScheduleSuite):
    plugin = "acme.plugin"
    target = "rise"


def report(name: str, outcome: str, message: str = "") -> Any:
    return SimpleNamespace(
        nodeid=name,
        failed=outcome == "failed",
        skipped=outcome == "skipped",
        longrepr=SimpleNamespace(reprcrash=SimpleNamespace(message=message)),
        longreprtext=f"some lines\nlast of {name}\n",
    )


def test_a_test_has_the_worst_outcome_of_its_parts(tmp_path: Path) -> None:
    outcomes = {
        "good": ["passed", "passed", "passed"],
        "absent": ["skipped", "passed"],
        "no end": ["passed", "passed", "failed"],
        "skipped after a failure": ["passed", "failed", "skipped"],
        "failed after a skip": ["skipped", "failed"],
    }
    recorder = Recorder(tmp_path / "tests.json")
    recorder.pytest_collection_modifyitems([SimpleNamespace(nodeid=name, cls=Mine, name=name) for name in outcomes])  # type: ignore[misc]
    for name, parts in outcomes.items():
        for part in parts:
            recorder.pytest_runtest_logreport(report(name, part, f"wrong {name}" if name != "no end" else ""))
    recorder.pytest_collectreport(report("broken.py", "failed"))
    recorder.pytest_collectreport(report("good.py", "passed"))
    recorder.pytest_sessionfinish()
    found = json.loads((tmp_path / "tests.json").read_text())
    assert {test["test"]: (test["outcome"], test.get("message")) for test in found["tests"]} == {
        "good": ("passed", None),
        "absent": ("skipped", None),
        "no end": ("failed", "last of no end"),
        "skipped after a failure": ("failed", "wrong skipped after a failure"),
        "failed after a skip": ("failed", "wrong failed after a skip"),
    }
    assert found["errors"] == ["broken.py: last of broken.py"]
    assert {(test["kind"], test["plugin"], test["target"], test["suite"]) for test in found["tests"]} == {
        ("lr schedule", "acme.plugin", "rise", "Mine")
    }


def test_components_get_a_class_if_their_suite_needs_no_facts_of_the_author() -> None:
    entries = [entry for kind in ("model", "schedule", "tracker", "task") for entry in Registry.of(toy).entries(kind)]
    assert {bool(SUITES[entry.kind.name].facts) for entry in entries} == {True, False}
    text = written([toy.__name__], entries, ["acme.plugin"])
    classes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    assert [ast.unparse(one.bases[0]) for one in classes] == [
        "PluginSuite",
        *(SUITES[entry.kind.name].target.partition(":")[2] for entry in entries if not SUITES[entry.kind.name].facts),
    ]
    assert all(f"target = {entry.spec.key!r}" in text for entry in entries if not SUITES[entry.kind.name].facts)
    assert "builds_on = ('acme.plugin',)" in text
    assert written([], [entry for entry in entries if SUITES[entry.kind.name].facts], []) == ""
    assert kind_of(Mine) == "lr schedule"
    assert kind_of(SimpleNamespace) is None
