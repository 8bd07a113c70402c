"""``d9d report``: one page about runs that fetches nothing, shows their curves, and takes their texts literally."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from d9d_core.program.text import parse_programs
from d9d_core.schedule import Backward, Forward
from d9d_reports.report.series import series_charts, thinned
from d9d_reports.report.timeline import ideal_boxes

from tests.browser import chromium, find_chromium

Run = Callable[..., tuple[int, str, str]]
HOSTILE = "</script><img src=x onerror='document.title=1'><a href=\"https://example.org\">x</a>"
PROGRAMS = "F0.0 F0.1 B0.0 R<0.1 B0.1 R0\nF1.0 B1.0 F1.1 S<1.1 B1.1 R1\n"


def write_run(directory: Path, steps: int = 40, lr: float = 0.1, description: str = "") -> Path:
    """A run as training leaves it, with all that a page shows."""
    directory.mkdir(parents=True)
    job = {
        "run": {"name": directory.name, "description": description},
        "steps": steps,
        "model": {"name": "hello"},
        "mesh": {"pp": 2, "dp_shard": 4},
        "parallel": [{"name": "fsdp", "reshard_after_forward": True}],
        "optimizer": {"name": "adamw", "lr": lr},
    }
    (directory / "job.yaml").write_text(yaml.safe_dump(job, sort_keys=False))
    lines: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        values = {"loss": 5 / step + lr, "lr": lr, "grad_norm": 1 / step, "tokens": 100.0 * step}
        usage = {"tokens_per_second": 50.0, "mfu": 0.4, "memory/reserved_gib": 2.0, HOSTILE: 1.0}
        lines += [{"step": step, **values, **usage}]
        if step % 10 == 0:
            lines += [{"step": step, "eval/loss": 6 / step, "eval/perplexity": None}]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 41, "lo')
    load = {"step": 10, "table": "router/load", "row": "layer", "column": "expert", "unit": "load", "neutral": 1.0}
    table = load | {"rows": ["0", HOSTILE], "values": [[1.0, None, 0.5], [0.5, 2.0, 1.25]]}
    (directory / "tables.jsonl").write_text(json.dumps(table) + "\n")
    start = {
        "command": f"d9d train {HOSTILE}",
        "processes": 8,
        "phases": [{"name": "plan", "wall": 1.5, "cpu": 1}],
        "environment": {"torch": "2.13.0"},
    }
    (directory / "startup.json").write_text(json.dumps(start))
    plugin = {"version": "1.2.3", "editable": False, "sha256": "ab" * 32}
    (directory / "plugins.json").write_text(json.dumps({"plugins": {"d9d-hello": plugin}}))
    used = {"d9d-hello": ["model hello", f"task {HOSTILE}"]}
    facts = {"device": "cpu", "parameters": 1000, "trained_parameters": 10, "data": {"samples": 5}, "plugins": used}
    (directory / "facts.json").write_text(json.dumps(facts))
    (directory / "programs.txt").write_text(PROGRAMS)
    return directory


def charts_of(page: str) -> list[dict[str, Any]]:
    found = re.search(r'<script type="application/json" id="charts">(.*?)</script>', page, re.DOTALL)
    assert found
    charts: list[dict[str, Any]] = json.loads(found[1])
    return charts


def texts_of(page: str) -> str:
    """Everything between tags of the part that is neither data nor code."""
    return unescape(re.sub(r"<[^>]*>", " ", page.split('<script type="application/json"', maxsplit=1)[0]))


@pytest.mark.thorough
def test_a_page_has_curves_tables_timeline_and_what_ran(d9d: Run, tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", description="a first try")
    status, _, err = d9d("report", str(run))
    assert (status, err) == (
        0,
        f"the run in {run / 'report.html'}, {(run / 'report.html').stat().st_size / 1e6:.1f} MB\n",
    )
    page = (run / "report.html").read_text()
    assert len(page) < 6_000_000
    traces = {trace.get("name"): trace for chart in charts_of(page) for trace in chart["traces"]}
    assert {"loss", "eval/loss", "lr", "grad_norm", "tokens_per_second", "mfu", "memory/reserved_gib"} <= traces.keys()
    assert traces["eval/loss"]["x"] == [10, 20, 30, 40]
    assert traces["loss"]["y"][0] == pytest.approx(5.1)
    assert [t["z"][0] for c in charts_of(page) for t in c["traces"] if t["type"] == "heatmap"] == [[1.0, None, 0.5]] * 2
    shown = texts_of(page)
    for text in (
        "a first try",
        "pp 2  dp_shard 4",
        "fsdp  reshard_after_forward true",
        "d9d-hello",
        "1.2.3",
        "1.50 s",
        "1,000 parameters, 10 trained (1.00%)",
        "8 processes, pp 2 dp_shard 4, fsdp",
        "5.1 → 0.225",
    ):
        assert text in shown
    assert re.search(r"torch\s+2\.13\.0", shown)
    assert "of the time is idle" in shown


@pytest.mark.thorough
def test_several_runs_lie_over_one_another_with_the_fields_that_differ(d9d: Run, tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "x" / "a"), write_run(tmp_path / "y" / "a", lr=0.2, steps=20)]
    status, _, err = d9d("report", *map(str, runs), "--output", str(tmp_path / "new" / "both.html"))
    assert status == 0, err
    page = (tmp_path / "new" / "both.html").read_text()
    loss = charts_of(page)[0]["traces"]
    assert [trace["name"] for trace in loss] == ["x/a", "x/a", "y/a", "y/a"]
    assert re.search(r"optimizer\.lr\s+0\.1\s+0\.2", texts_of(page))


def test_texts_of_a_run_are_shown_as_they_are(d9d: Run, tmp_path: Path) -> None:
    run = write_run(tmp_path / "a<b>", description=HOSTILE)
    assert d9d("report", str(run))[0] == 0
    page = (run / "report.html").read_text()
    assert "<img" not in page.split("plotly.js v")[0]
    assert 'href="https://example.org' not in page
    assert page.count("</script>") == 3
    assert HOSTILE in unescape(page)
    named = [trace["name"] for chart in charts_of(page) for trace in chart["traces"] if "name" in trace]
    assert not any("<" in name for name in named), "plotly takes some tags"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere is no directory; give the directory of a run"),
        (["a", "--output", "page.pdf"], "--output: page.pdf must end in .html"),
        (["empty"], "no logged values yet: metrics.jsonl is missing or empty"),
    ],
)
def test_what_cannot_be_reported_is_told(
    d9d: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "a")
    write_run(tmp_path / "empty", steps=0)
    status, _, err = d9d("report", *arguments)
    assert (status, message in err) == (2, True), err


def test_damaged_files_beside_the_log_leave_their_part_out(d9d: Run, tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    for name in ("startup.json", "plugins.json", "facts.json", "programs.txt"):
        (run / name).write_text('{"phases": 3, "plugins": ')
    (run / "startup.json").write_text('{"phases": [{"name": 1}, 2], "environment": 3, "processes": "x"}')
    (run / "tables.jsonl").write_text('{"step": 1, "table": "router/load"}\n')
    (run / "job.yaml").write_text("a: [")
    assert d9d("report", str(run))[0] == 0
    page = (run / "report.html").read_text()
    shown = texts_of(page)
    assert "Plugins of the job" not in shown
    assert "tables.jsonl is damaged" in shown
    assert re.search(r"a\s+damaged", shown)
    assert charts_of(page)[0]["traces"][0]["name"] == "loss"


def test_long_curves_keep_their_ends_and_extremes() -> None:
    points = [(step, math.sin(step / 500)) for step in range(100_000)]
    points[777], points[55_555] = (777, 9.0), (55_555, -9.0)
    kept = thinned(points, 1000)
    assert len(kept) <= 1000
    assert {points[0], points[-1], points[777], points[55_555]} <= set(kept)
    assert list(kept) == sorted(set(kept))
    assert thinned(points[:1000], 1000) == points[:1000]


def test_a_constant_series_has_its_value_on_the_axis() -> None:
    lines = [{"step": 1, "lr": 3e-3, "loss": 2.0}, {"step": 2, "lr": 3e-3, "loss": 1.0}]
    record: Any = SimpleNamespace(job={}, lines=lines)
    axes = {chart.traces[0]["name"]: chart.layout["yaxis"] for chart in series_charts({"run": record})}
    assert axes == {"loss": {}, "lr": {"range": [0.0, 6e-3]}}


def test_a_timeline_starts_each_computation_when_it_can() -> None:
    boxes = ideal_boxes(parse_programs(PROGRAMS))
    begins = {(type(box.action), box.action.stage, box.action.microbatch): box.begin for box in boxes}
    assert begins[Forward, 1, 0] == 1
    assert begins[Backward, 1, 0] == 2
    assert begins[Backward, 0, 0] == 4
    assert begins[Backward, 1, 1] == 5
    assert begins[Backward, 0, 1] == 7


@pytest.mark.full
def test_a_browser_shows_the_page_without_a_network(d9d: Run, tmp_path: Path) -> None:
    program = find_chromium()
    if program is None:
        pytest.skip("no Chromium; with Debian: apt-get install chromium")
    run = write_run(tmp_path / "a", description=HOSTILE)
    assert d9d("report", str(run))[0] == 0
    charts = len(charts_of((run / "report.html").read_text()))
    with chromium(program, tmp_path / "profile") as browser:
        browser.listen()
        for name, width, dark in (("desktop", 1300, False), ("phone", 390, False), ("dark", 1300, True)):
            browser.resize(width, 844, dark)
            browser.open((run / "report.html").as_uri())
            assert int(browser.wait_for("document.body?.dataset.drawn")) == 1, "folded charts are not drawn"
            assert browser.evaluate("document.documentElement.scrollWidth") <= width
            browser.evaluate("document.querySelectorAll('details').forEach(section => { section.open = true; })")
            browser.wait_for(f"Number(document.body.dataset.drawn) === {charts}")
            assert browser.evaluate("document.querySelectorAll('.js-line').length") >= 8
            assert browser.evaluate("document.querySelectorAll('.bars .point').length") == 8
            assert browser.evaluate("document.documentElement.scrollWidth") <= width
            assert browser.evaluate("document.title") == "a"
            picture = browser.screenshot(whole=True)
            assert len(picture) > 20_000, "an empty page is smaller"
            (tmp_path / f"{name}.png").write_bytes(picture)
        browser.open("about:blank")
        browser.open((run / "report.html").as_uri())
        browser.wait_for("document.body?.dataset.drawn")
        browser.send("Page.printToPDF")
        assert browser.evaluate("document.querySelectorAll('details:not([open])').length") == 0, "paper has no folds"
    assert browser.complaints == []
    assert {url for url in browser.requests if not url.startswith("data:")} == {(run / "report.html").as_uri()}
