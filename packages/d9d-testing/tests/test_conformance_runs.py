"""Conformance runs with stand-ins for pytest: suites that run, rows, errors, the command's table and the badge."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from datetime import date
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from d9d_core.errors import PluginError
from d9d_core.registry.entries import Origin
from d9d_testing.conformance import badge, command, recorder, run
from d9d_testing.conformance.run import Outcome, Row, conform
from d9d_testing.conformance.suites import DECLARATIONS, GROUP, written

ACME = [Origin("acme", "1.2", "acme.a"), Origin("acme", "1.2", "acme.b")]
OTHER = Origin("other", "3.0", "other.plugin")


def entry(origin: Origin, kind: str, key: str) -> Any:
    return SimpleNamespace(origin=origin, kind=SimpleNamespace(name=kind), spec=SimpleNamespace(key=key))


def registry(*entries: Any, problems: Sequence[Any] = ()) -> Any:
    return SimpleNamespace(problems=problems, plugins=[*ACME, OTHER], entries=lambda: list(entries))


def done(kind: str | None, about: str, outcome: str = "passed", message: str = "", suite: str = "TestIt") -> Any:
    """Record of a test about a declaration module or a component."""
    place = {"plugin": about, "target": None} if kind == DECLARATIONS else {"plugin": "x", "target": about}
    return {"kind": kind, **place, "suite": suite, "test": f"test_{about}", "outcome": outcome, "message": message}


# --- which suites run


def ran(
    monkeypatch: pytest.MonkeyPatch, shipped: list[str], *found: tuple[list[Any], list[str]]
) -> list[tuple[list[str], str]]:
    """Let runs of pytest find these tests; the arguments of the runs, and the source of suites written for them."""
    runs: list[tuple[list[str], str]] = []
    left = list(found)

    def fake(tests: Sequence[str], place: Path) -> tuple[list[Any], list[str]]:
        source = place / "test_written.py"
        runs.append((list(tests), source.read_text() if source.exists() else ""))
        assert all(test == str(source) for test in tests if test.endswith("test_written.py"))
        return left.pop(0)

    monkeypatch.setattr(run, "_run", fake)
    monkeypatch.setattr(run, "_shipped", lambda name: shipped if name == "acme" else [])
    return runs


def test_shipped_suites_run_first_and_what_they_leave_out_gets_suites(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [
        entry(ACME[0], "metric", "m"), entry(ACME[1], "writer", "w"), entry(ACME[1], "head", "h"),
        entry(ACME[1], "tracker", "t"), entry(OTHER, "tracker", "far"),
    ]  # fmt: skip
    first = [
        done(DECLARATIONS, "acme.a", suite="TestA"), done("metric", "deep/m", suite="TestM"),
        done("metric", "m", "skipped", suite="TestM"), done("metric", "m", "passed", suite="TestMore"),
        done(None, "any", "failed", "boom\nand more"), done(None, "fine"), done("tracker", "far", "failed", ""),
    ]  # fmt: skip
    second = [done(DECLARATIONS, "acme.b", "failed", "wrong\nat"), done(DECLARATIONS, "acme.b", "failed", "too")]
    runs = ran(monkeypatch, ["acme.suites"], (first, ["no module"]), (second, ["late"]))
    outcome = conform(registry(*entries), "Acme", [Path("x.py")])
    assert runs[0][0] == ["x.py", "acme.suites"]
    assert len(runs) == 2
    text = runs[1][1]
    assert "plugin = 'acme.b'\n    builds_on = ('other.plugin',)\n" in text
    assert "plugin = 'acme.b'\n    target = 't'\n" in text
    assert "acme.a" not in text
    assert "far" not in text
    missing = "write a subclass of {} in a module that an entry point of 'd9d.conformance' names"
    writer = "WriterSuite (d9d_testing.suites.inference.writer) with read()"
    tracker = "TrackerSuite (d9d_testing.suites.tracker)"
    assert outcome == Outcome(
        "acme",
        "1.2",
        [
            Row(DECLARATIONS, "acme.a", ("TestA",), 1),
            Row(DECLARATIONS, "acme.b", ("TestIt",), 0, 2, problem="test_acme.b: wrong"),
            Row("metric", "m", ("TestM", "TestMore"), 2, 0, 1),
            Row("writer", "w", problem=missing.format(writer)),
            Row("head", "h"),
            Row("tracker", "t", problem=missing.format(tracker)),
        ],
        ["no module", "test_any: boom", "test_far: ", "late"],
    )
    assert [row.verdict for row in outcome.rows] == ["passed", "failed", "passed", "missing", "declarations", "missing"]
    assert [outcome.count(word) for word in ("passed", "failed", "skipped")] == [3, 2, 1]  # type: ignore[arg-type]


def test_only_suites_that_are_needed_run(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = [done(DECLARATIONS, "acme.a"), done(DECLARATIONS, "acme.b")]
    runs = ran(monkeypatch, ["acme.suites"], (whole, []))
    outcome = conform(registry(), "acme")
    assert (runs, outcome.passed, outcome.errors) == ([(["acme.suites"], "")], True, [])
    runs = ran(monkeypatch, [], (whole, []))
    assert conform(registry(), "acme").passed
    assert [len(tests) for tests, _ in runs] == [1]  # only the written suites
    assert runs[0][1].count("PluginSuite)") == 2
    runs = ran(monkeypatch, [], (whole, []))
    assert conform(registry(), "acme", [Path("x.py")]).passed
    assert runs == [(["x.py"], "")]


def test_a_plugin_that_is_broken_or_unknown_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = SimpleNamespace(origin=Origin("bad", "1", "bad.plugin"))
    monkeypatch.setattr(run, "_run", lambda *_: pytest.fail("it must not run"))
    with pytest.raises(PluginError, match=r"correct this first: d9d plugins check bad$"):
        conform(registry(problems=[problem]), "bad")
    with pytest.raises(PluginError) as caught:
        conform(registry(problems=[problem]), "absent")
    assert str(caught.value) == "no plugin 'absent' is loaded; install it, or choose from: acme, other"


def test_modules_of_suites_are_those_of_the_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [SimpleNamespace(module=module) for module in ("acme.z", "acme.c", "acme.z")]

    def found(name: str) -> Any:
        if name != "acme":
            raise PackageNotFoundError(name)
        return SimpleNamespace(entry_points=SimpleNamespace(select=lambda group: points if group == GROUP else []))

    monkeypatch.setattr(run, "distribution", found)
    assert (run._shipped("acme"), run._shipped("plugin.py")) == (["acme.c", "acme.z"], [])


def test_all_tests_that_are_skipped_leave_a_component_without_a_suite() -> None:
    tests = [done("metric", "m", "skipped"), done("head", "h", "skipped")]
    (row,) = run._rows([], [entry(ACME[0], "metric", "m")], tests)
    assert row == Row("metric", "m", ("TestIt",), skipped=1, problem="all tests were skipped")
    assert row.verdict == "missing"
    (row,) = run._rows([], [entry(ACME[0], "head", "h")], tests)
    assert row == Row("head", "h", ("TestIt",), skipped=1)
    assert (row.verdict, Outcome("acme", "1", [row]).passed) == ("declarations", True)
    assert not Outcome("acme", "1", [row], ["an error"]).passed
    (row,) = run._rows([], [entry(ACME[0], "metric", "m")], [done("metric", "m", "failed", "")])
    assert (row.problem, row.verdict) == ("test_m: ", "failed")


# --- processes of pytest


def processed(monkeypatch: pytest.MonkeyPatch, place: Path, status: int, record: Any = None) -> Any:
    """Result of a process of pytest with a status and a record, and the process's command and environment."""
    given: dict[str, Any] = {}

    def process(arguments: list[str], check: bool, env: dict[str, str]) -> Any:
        assert not (place / "record.json").exists()
        given.update(arguments=arguments, check=check, env=env)
        if record is not None:
            (place / "record.json").write_text(json.dumps(record))
        return SimpleNamespace(returncode=status)

    monkeypatch.setattr(run.subprocess, "run", process)
    return run._run(["a.py", "acme.suites"], place), given


def test_pytest_runs_without_the_settings_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS", "KEPT"):
        monkeypatch.setenv(name, "mine")
    (tmp_path / "record.json").write_text("of an earlier run")
    found, given = processed(monkeypatch, tmp_path, 0, {"tests": [1], "errors": []})
    assert found == ([1], [])
    settings = tmp_path / "pytest.ini"
    assert given["arguments"] == [
        sys.executable, "-m", "pytest", "-q", "--no-header", "--tb=short", "-c", str(settings), "--rootdir",
        str(tmp_path), "-p", "no:cacheprovider", "-p", "d9d_testing.conformance.recorder", "--conformance-record",
        str(tmp_path / "record.json"), "--import-mode=importlib", "--pyargs", "a.py", "acme.suites",
    ]  # fmt: skip
    assert settings.read_text() == "[pytest]\n"
    assert (given["check"], given["env"]["KEPT"]) == (False, "mine")
    assert not given["env"].keys() & {"PYTEST_ADDOPTS", "PYTEST_PLUGINS"}


@pytest.mark.parametrize(
    ("status", "errors", "told"),
    [
        (0, [], []),
        (1, [], []),
        (5, [], []),
        (2, [], ["pytest ended with status 2 before all tests ran; its output stands above"]),
        (3, ["a.py: wrong"], ["a.py: wrong"]),
        (1, ["a.py: wrong"], ["a.py: wrong"]),
    ],
)
def test_a_process_that_ends_early_is_an_error(
    status: int, errors: list[str], told: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert processed(monkeypatch, tmp_path, status, {"tests": [], "errors": errors})[0] == ([], told)


def test_a_process_without_a_record_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tests, errors), _ = processed(monkeypatch, tmp_path, -9)
    assert (tests, errors) == ([], ["pytest ended with status -9 and wrote no record; its output stands above"])


# --- suites that are written, and records


def test_written_suites_are_numbered_classes_of_their_kind() -> None:
    entries = [entry(ACME[0], "lr schedule", "rise"), entry(ACME[0], "writer", "w"), entry(ACME[1], "head", "h")]
    assert written(["acme.a"], entries, ["o.p", "q"]) == "\n".join([
        '"""Conformance suites without facts of the author."""', "",
        "from d9d_testing.suites.plugin import PluginSuite  # noqa", "class TestDeclarations0(PluginSuite):",
        "    plugin = 'acme.a'\n    builds_on = ('o.p', 'q')\n",
        "from d9d_testing.suites.lr_schedule import LrScheduleSuite  # noqa",
        "class TestLrSchedule1(LrScheduleSuite):", "    plugin = 'acme.a'\n    target = 'rise'\n",
    ])  # fmt: skip
    assert written([], [], []) == ""


def test_tests_for_gpus_are_skipped_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    marked: Any = SimpleNamespace(get_closest_marker=lambda name: "marker" if name == "gpu" else None)
    plain: Any = SimpleNamespace(get_closest_marker=lambda _name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    recorder.pytest_runtest_setup(plain)
    with pytest.raises(pytest.skip.Exception, match="needs a CUDA device"):
        recorder.pytest_runtest_setup(marked)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    recorder.pytest_runtest_setup(marked)


def test_the_recorder_needs_the_name_of_its_file(tmp_path: Path) -> None:
    options: list[Any] = []
    recorder.pytest_addoption(SimpleNamespace(addoption=lambda name, **more: options.append((name, more))))  # type: ignore[arg-type]
    ((name, more),) = options
    assert (name, more["type"], more["required"]) == ("--conformance-record", Path, True)
    told: list[Any] = []
    manager = SimpleNamespace(register=lambda plugin, name: told.append((plugin, name)))
    config: Any = SimpleNamespace(
        addinivalue_line=lambda *given: told.append(given),
        pluginmanager=manager,
        getoption=lambda name: {"--conformance-record": tmp_path / "r.json"}[name],
    )
    recorder.pytest_configure(config)
    assert told[0] == ("markers", "gpu: needs a CUDA device")
    plugin, registered = told[1]
    assert registered == "conformance-recorder"
    nothing: Any = SimpleNamespace(nodeid="a.py", failed=True, longreprtext=" \n")
    plugin.pytest_collectreport(nothing)
    plugin.pytest_collection_modifyitems([SimpleNamespace(nodeid="a.py::test_b", name="test_b")])
    plugin.pytest_runtest_logreport(SimpleNamespace(nodeid="a.py::test_b", failed=False, skipped=False))
    plugin.pytest_sessionfinish()
    assert json.loads((tmp_path / "r.json").read_text()) == {
        "tests": [
            {"kind": None, "plugin": None, "target": None, "suite": "object", "test": "test_b", "outcome": "passed"}
        ],
        "errors": ["a.py: "],
    }


# --- the command and the badge

OUTCOMES = {
    "passed": Outcome("acme", "1.2", [Row("metric", "m", ("TestM",), 3, 0, 1), Row("head", "h")]),
    "failed": Outcome("acme", "1.2", [Row("metric", "m", ("TestM",), 3, 2, problem="test_m: [wrong]")], ["a.py: bad"]),
    "incomplete": Outcome("acme", "1.2", [Row("metric", "m", problem="write a subclass")]),
    "errors": Outcome("acme", "1.2", [Row("head", "h")], ["a.py: bad"]),
}


def printed(
    outcome: Outcome, monkeypatch: pytest.MonkeyPatch, capsys: Any, badge: Path | None = None
) -> tuple[list[str], int]:
    """Lines and exit status of the command."""
    given: list[Any] = []
    monkeypatch.setattr(run, "conform", lambda *arguments: given.append(arguments) or outcome)
    monkeypatch.setattr(command, "discover", lambda _policy: "the registry")
    suites = Path(__file__).parent
    status = 0
    try:
        command.conform_plugin("Acme", badge, [suites])
    except typer.Exit as end:
        status = end.exit_code
    assert given == [("the registry", "Acme", [suites.resolve()])]
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()], status


@pytest.mark.parametrize(
    ("name", "lines", "status"),
    [
        ("passed", ["metric m 3 0 1 passed", "head h 0 0 0 declarations", "acme 1.2 conforms: 3 tests passed"], 0),
        (
            "failed",
            [
                "metric m 3 2 0 failed", "metric m: test_m: [wrong]", "a.py: bad",
                "acme 1.2 does not conform: 3 tests passed",
            ],
            1,
        ),
        (
            "incomplete",
            ["metric m 0 0 0 missing", "metric m: write a subclass", "acme 1.2 does not conform: 0 tests passed"],
            1,
        ),
        ("errors", ["head h 0 0 0 declarations", "a.py: bad", "acme 1.2 does not conform: 0 tests passed"], 1),
    ],
)  # fmt: skip
def test_the_command_prints_a_table_then_problems_then_the_verdict(
    name: str, lines: list[str], status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = printed(OUTCOMES[name], monkeypatch, capsys)
    assert found == (["kind name passed failed skipped verdict", *lines], status)


def test_the_command_names_the_files_of_the_badge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines, status = printed(OUTCOMES["failed"], monkeypatch, capsys, tmp_path)
    assert (lines[-2:], status) == ([str(tmp_path / f"conformance.{form}") for form in ("json", "svg")], 1)
    assert json.loads((tmp_path / "conformance.json").read_text())["status"] == "failed"


def test_numbers_of_the_table_are_on_the_right(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "conform", lambda *_: OUTCOMES["passed"])
    monkeypatch.setattr(command, "discover", lambda _policy: None)
    command.conform_plugin("acme", None, [])
    head, row = (line.rstrip() for line in capsys.readouterr().out.splitlines()[:2])
    for title, number in (("passed", "3"), ("failed", "0"), ("skipped", "1")):
        end = head.index(title) + len(title)
        assert row[end - 1] == number
    assert row.index("metric") == head.index("kind")
    assert row.rindex("passed") == head.index("verdict")
    assert (command.app._add_completion, command.app.pretty_exceptions_enable) == (False, False)


@pytest.mark.parametrize(
    ("name", "status", "text", "width", "place", "colour"),
    [
        ("passed", "passed", "3 passed", 53, 109.5, "#2e7d32"),
        ("failed", "failed", "2 failed", 53, 109.5, "#c62828"),
        ("incomplete", "incomplete", "incomplete", 66, 116, "#9e6a03"),
        ("errors", "failed", "0 failed", 53, 109.5, "#c62828"),
    ],
)
def test_the_badge_has_the_width_of_its_texts(
    name: str, status: str, text: str, width: int, place: float, colour: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(badge, "version", lambda package: {"d9d-core": "0.1.0", "torch": "2.11"}[package])
    total = 75 + width + 16  # "d9d 0.1.0" has 59 pixels, and each text a margin of 8 on both sides
    assert badge.image(OUTCOMES[name]) == (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{total}" height="20" role="img">'
        f"<title>d9d 0.1.0: {text}</title>"
        f'<rect width="{total}" height="20" rx="3" fill="#444"/>'
        f'<rect x="75" width="{width + 16}" height="20" rx="3" fill="{colour}"/>'
        '<g fill="#fff" font-family="Verdana,sans-serif" font-size="11" text-anchor="middle">'
        '<text x="37.5" y="14" textLength="59">d9d 0.1.0</text>'
        f'<text x="{place:g}" y="14" textLength="{width}">{text}</text></g></svg>\n'
    )
    facts = badge.facts(OUTCOMES[name], date(2026, 2, 3))
    del facts["python"]
    row = OUTCOMES[name].rows[0]
    assert facts.pop("components")[0] == {
        "kind": row.kind, "name": row.name, "verdict": row.verdict, "suites": list(row.suites),
        "passed": row.passed, "failed": row.failed, "skipped": row.skipped,
    }  # fmt: skip
    assert facts == {
        "distribution": "acme", "version": "1.2", "d9d_core": "0.1.0", "torch": "2.11", "date": "2026-02-03",
        "status": status, "passed": row.passed, "failed": row.failed, "skipped": row.skipped,
        "errors": list(OUTCOMES[name].errors),
    }  # fmt: skip


def test_files_of_a_badge_are_listed_and_replaced(tmp_path: Path) -> None:
    for today in (date(2026, 1, 1), date(2026, 1, 2)):
        files = badge.write_badge(tmp_path / "a" / "b", OUTCOMES["passed"], today)
        assert files == [tmp_path / "a" / "b" / f"conformance.{form}" for form in ("json", "svg")]
    text = files[0].read_text()
    assert text == json.dumps(badge.facts(OUTCOMES["passed"], date(2026, 1, 2)), indent=1) + "\n"
    assert files[1].read_text() == badge.image(OUTCOMES["passed"])
