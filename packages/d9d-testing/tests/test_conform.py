"""``d9d plugins conform``: suites of an installed distribution run, and a failing or absent one fails the command."""

from __future__ import annotations

import json
import os
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from datetime import date
from pathlib import Path

import pytest
import typer
from d9d_core.errors import PluginError
from d9d_core.registry.hooks import KINDS as HOOKS
from d9d_core.registry.loader import discover
from d9d_testing.conformance.badge import image, write_badge
from d9d_testing.conformance.command import conform_plugin
from d9d_testing.conformance.run import Outcome, Row, conform
from d9d_testing.conformance.suites import DECLARATIONS, SUITES
from d9d_testing.scaffold.package import write_plugin

Install = Callable[[str, str], Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Install a scaffold for this process and its children; returns the directory of the package's modules."""

    def installed(name: str, kind: str) -> Path:
        write_plugin(tmp_path / name, name, kind)
        package, source = name.replace("-", "_"), tmp_path / name / "src"
        metadata = source / f"{package}-0.1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
        points = f"[d9d]\n{package} = {package}.plugin\n[d9d.conformance]\n{package} = {package}.conformance\n"
        (metadata / "entry_points.txt").write_text(points)
        monkeypatch.syspath_prepend(source)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")]))
        return source / package

    yield installed
    for module in [name for name in sys.modules if name.partition(".")[0].startswith("acme_")]:
        del sys.modules[module]


def rows(outcome: Outcome) -> dict[str, Row]:
    return {row.kind: row for row in outcome.rows}


@pytest.mark.thorough
def test_every_kind_has_a_suite_or_only_declarations() -> None:
    assert {kind.name for kind in HOOKS} - SUITES.keys() == {
        "head", "view", "health check", "job check", "command", "capability"
    }  # fmt: skip
    for suite in SUITES.values():
        module, _, name = suite.target.partition(":")
        assert hasattr(__import__(module, fromlist=[name]), name)


@pytest.mark.thorough
def test_shipped_suites_run_and_a_badge_is_written(install: Install, tmp_path: Path, capfd) -> None:
    install("acme-rise", "lr_schedule")
    conform_plugin("Acme_Rise", tmp_path / "badge", [])
    out = capfd.readouterr().out
    assert "acme-rise 0.1.0 conforms" in out
    lines = [line.split()[:2] for line in out.splitlines()]
    title = lines.index(["kind", "name"])
    assert lines[title + 1] == ["declarations", "acme_rise.plugin"]
    assert lines[title + 2][:2] == ["lr", "schedule"]
    facts = json.loads((tmp_path / "badge" / "conformance.json").read_text())
    assert (facts["status"], facts["failed"], facts["errors"]) == ("passed", 0, [])
    assert facts["passed"] > 10
    assert [part["suites"] for part in facts["components"]] == [["TestPlugin"], ["TestAcmeRise"]]
    assert {"d9d_core", "torch", "python", "date"} <= facts.keys()
    root = ET.parse(tmp_path / "badge" / "conformance.svg").getroot()
    assert f"{facts['passed']} passed" in "".join(root.itertext())


@pytest.mark.thorough
def test_a_failing_suite_fails_the_command(install: Install, capfd) -> None:
    package = install("acme-fall", "lr_schedule")
    source = (package / "lr_schedule.py").read_text()
    (package / "lr_schedule.py").write_text(
        source + "\n\ndef acme_fall(config, total):\n    return lambda step: -1.0\n"
    )
    with pytest.raises(typer.Exit) as end:
        conform_plugin("acme-fall", None, [])
    assert end.value.exit_code == 1
    assert "acme-fall 0.1.0 does not conform" in capfd.readouterr().out


@pytest.mark.thorough
def test_a_component_without_a_shipped_suite_gets_one_if_it_needs_no_facts(install: Install, tmp_path: Path) -> None:
    (install("acme-bare", "lr_schedule") / "conformance.py").write_text("")
    found = rows(conform(discover(), "acme-bare"))
    assert (found["lr schedule"].verdict, found[DECLARATIONS].verdict) == ("passed", "passed")
    package = install("acme-lines", "writer")
    suites = tmp_path / "suites.py"
    suites.write_text((package / "conformance.py").read_text())
    (package / "conformance.py").write_text("")
    outcome = conform(discover(), "acme-lines")
    assert not outcome.passed
    assert "write a subclass of WriterSuite" in rows(outcome)["writer"].problem
    assert "read()" in rows(outcome)["writer"].problem
    assert conform(discover(), "acme-lines", [suites]).passed, "suites that are not installed may be named"


@pytest.mark.thorough
def test_a_failing_test_about_no_component_counts(install: Install) -> None:
    file = install("acme-plain", "command") / "conformance.py"
    file.write_text(file.read_text() + "\n\ndef test_anything() -> None:\n    assert 1 == 2, 'no'\n")
    outcome = conform(discover(), "acme-plain")
    assert not outcome.passed
    assert outcome.errors == ["test_anything: AssertionError: no"]
    assert rows(outcome)[DECLARATIONS].verdict == "passed"


@pytest.mark.thorough
def test_suites_that_do_not_load_fail_the_command(install: Install) -> None:
    (install("acme-worse", "command") / "conformance.py").write_text("import absent_module\n")
    outcome = conform(discover(), "acme-worse")
    assert not outcome.passed
    assert "absent_module" in outcome.errors[0]
    assert rows(outcome)["command"].verdict == "declarations"


def test_an_absent_or_broken_plugin_is_an_error(install: Install) -> None:
    with pytest.raises(PluginError, match="no plugin 'acme-absent' is loaded; install it"):
        conform(discover(), "acme-absent")
    (install("acme-broken", "command") / "plugin.py").write_text("1 / 0\n")
    with pytest.raises(PluginError, match="correct this first: d9d plugins check acme-broken"):
        conform(discover(), "acme-broken")


def test_a_missing_path_of_suites_is_named() -> None:
    with pytest.raises(typer.BadParameter, match=r"absent\.py does not exist"):
        conform_plugin("d9d-optim", None, [Path("absent.py")])


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (Row("metric", "m", passed=3), "3 passed"),
        (Row("metric", "m", passed=3, failed=2, problem="x"), "2 failed"),
        (Row("metric", "m", problem="x"), "incomplete"),
    ],
)
def test_the_badge_tells_the_outcome(row: Row, says: str, tmp_path: Path) -> None:
    outcome = Outcome("acme", "1.0", [row])
    assert says in image(outcome)
    for today in (date(2026, 1, 1), date(2026, 1, 2)):  # a later badge replaces the earlier one
        write_badge(tmp_path / "a" / "b", outcome, today)
    facts = json.loads((tmp_path / "a" / "b" / "conformance.json").read_text())
    assert facts["date"] == "2026-01-02"
