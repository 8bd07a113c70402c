"""Page of a report: its parts, and the texts of runs in it."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from d9d_core.errors import JobError, PluginError
from d9d_reports.report import page as page_module
from d9d_reports.report.page import report_page, write_report
from d9d_reports.runs.record import RunRecord

MADE = datetime(2026, 1, 2, 3, 4, tzinfo=UTC)
LINES = ({"step": 1, "loss": 2.0, "lr": 0.1}, {"step": 2, "loss": 1.0, "lr": 0.2})


@pytest.fixture(autouse=True)
def plotly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short text for the library."""
    monkeypatch.setattr(page_module, "_plotly", lambda: "PLOTLY")


def record(directory: Path, lines: Any = LINES, **job: Any) -> RunRecord:
    return RunRecord(directory, job, lines, 0)


def made(runs: Mapping[str, RunRecord]) -> str:
    return report_page(runs, MADE).split("<body>", maxsplit=1)[1]


def test_the_page_of_a_run_begins_with_its_facts_tiles_loss_and_plugins_and_folds_the_rest(tmp_path: Path) -> None:
    (tmp_path / "programs.txt").write_text("F0.0 B0.0 R0\n")
    start = {"environment": {"torch": "2"}, "wall": 2.5, "phases": [{"name": "plan", "wall": 2.5}]}
    (tmp_path / "startup.json").write_text(json.dumps(start))
    (tmp_path / "facts.json").write_text(json.dumps({"plugins": {"d9d-hello": ["model a"]}}))
    (tmp_path / "tables.jsonl").write_text('{"step": 1, "table": "x"}\n')
    found = made({"a<": record(tmp_path, run={"description": "first & best"}, device="cpu")})
    shown, _, rest = found.partition("<details>")
    parts = re.findall(r"<h1>.*?</h1>|<h2>.*?</h2>|<p class=\"weak\">.*?</p>|<h3>.*?</h3>|class=\"tiles\"", shown)
    assert parts == [
        '<h1>a&lt; <span class="status started">started</span></h1>',
        f'<p class="weak">first &amp; best<br>{tmp_path}</p>',
        'class="tiles"', "<h3>loss</h3>", "<h2>Plugins of the job</h2>",
    ]  # fmt: skip
    assert "d9d-hello" in shown
    assert "d9d-hello" not in rest
    assert re.findall(r'<summary><b>(.*?)</b> <span class="weak">(.*?)</span></summary>', "<details>" + rest) == [
        ("Curves", "learning rate"), ("Tables", "heat maps of logged tables"), ("Pipeline", "one step of each rank"),
        ("Layout", "mesh, strategies, batch, precision, kernels"), ("Last start", "ready after 2.5 s"),
        ("Environment", "versions and device"), ("Job", "job.yaml, all defaults filled in"),
    ]  # fmt: skip
    assert found.count("<details>") == found.count("</details>") == 7
    assert '<p class="note">Made by d9d report, 2026-01-02 03:04 UTC.</p>' in found
    assert "Differences of the jobs" not in found
    # Wide cards: the first chart and the pipeline. A chart without curves has a note and no number.
    wide = re.findall(r'<div class="card full"><h3>(.*?)</h3>(<div id="chart-\d"></div>)?', found)
    assert wide == [("loss", '<div id="chart-0"></div>'), ("A step of the pipeline", '<div id="chart-2"></div>')]
    assert re.search(r'<div class="card"><h3>Tables</h3><p class="note">\S+ is damaged: KeyError', found)
    assert '<div class="card"><h3>learning rate</h3><div id="chart-1"></div></div>' in found


def test_the_page_of_several_runs_has_their_differences_and_a_folded_section_for_each(tmp_path: Path) -> None:
    runs = {
        "first": record(tmp_path / "a", run={"description": "slow"}, seed=1),
        "second": record(tmp_path / "b", lines=(), seed=2),
        "third": record(tmp_path / "c"),
    }
    found = made(runs)
    assert "<h1>first and second and third</h1>" in found
    assert re.findall(r'<p class="weak">(.*?)</p>', found) == ["first: slow", "second has logged nothing yet"]
    assert '<h2>Results</h2><div class="card"><div class="wide"><table>' in found
    assert '<h2>Differences of the jobs</h2><div class="card"><div class="wide"><table>' in found
    sections = re.findall(r'<summary><b>(\w+)</b> <span class="weak">plugins, ', found)
    assert sections == ["first", "second", "third"]
    assert found.count("<summary><b>Job</b>") == 2  # the third job could not be read
    assert "<h1>4 runs</h1>" in made({**runs, "fourth": record(tmp_path / "d")})


def test_the_error_of_a_failed_run_stands_above_everything_else_and_is_escaped(tmp_path: Path) -> None:
    failed = RunRecord(tmp_path, {"steps": 3}, LINES, 0, error="no <b>room</b>")
    found = made({"a": failed})
    assert (
        '<p class="error" role="alert">failed: no &lt;b&gt;room&lt;/b&gt;</p>'
        in found.partition('<div class="card">')[0]
    )
    assert "a failed: no &lt;b&gt;" in made({"a": failed, "b": record(tmp_path)})
    assert 'class="error"' not in made({"b": record(tmp_path)})


def test_two_runs_are_several(tmp_path: Path) -> None:
    found = made({"a": record(tmp_path / "a", seed=1), "b": record(tmp_path / "b", seed=2)})
    assert "<h2>Results</h2>" in found
    assert "Differences of the jobs" in found


def test_charts_are_data_that_no_text_of_a_run_can_leave(tmp_path: Path) -> None:
    name = "</script><b>&\u2028"
    found = made({"a": record(tmp_path, lines=[{"step": 1, name: 1.0}])})
    data = re.search(r'<script type="application/json" id="charts">(.*?)</script>\n<script>PLOTLY</script>', found)
    assert data is not None
    assert "<" not in data[1]
    (chart,) = json.loads(data[1])
    assert chart.keys() == {"traces", "layout", "height"}
    assert chart["traces"][0]["name"] == "&lt;/script&gt;&lt;b&gt;&amp;\u2028"
    assert chart["height"] == 280


def test_runs_without_values_have_no_page(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="no logged values yet"):
        report_page({"a": record(tmp_path, lines=()), "b": record(tmp_path, lines=())})


def test_a_page_is_written_with_its_directory_and_the_time_of_now(tmp_path: Path) -> None:
    target = tmp_path / "new" / "deep" / "report.html"
    write_report({"a": record(tmp_path)}, target)
    assert f"Made by d9d report, {datetime.now(UTC):%Y-%m}" in target.read_text()
    write_report({"a": record(tmp_path)}, target)


def test_without_plotly_the_package_to_install_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(PluginError, match=r"pip install 'd9d-reports\[plots\]'"):
        page_module._plotly()
