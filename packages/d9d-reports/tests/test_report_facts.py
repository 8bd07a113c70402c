"""Tables of a report about a run's key values, layout, start-up, plugins and job."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from d9d_reports.report import facts
from d9d_reports.runs.record import RunRecord


def record(directory: Path, lines: list[Mapping[str, Any]] | None = None, **given: Any) -> RunRecord:
    """Record of a run without files."""
    values: dict[str, Any] = {"job": {"steps": 10}, "saved": 0, **given}
    return RunRecord(directory, values.pop("job"), lines or [], values.pop("saved"), **values)


def test_a_table_escapes_texts_and_has_a_title_in_each_row() -> None:
    page = facts.table([("a<b", 1, "&"), ("c", 2, 3)], ("", "x>y", "z"))
    assert page == (
        '<div class="wide"><table><thead><tr><th></th><th>x&gt;y</th><th>z</th></tr></thead><tbody>'
        "<tr><th>a&lt;b</th><td>1</td><td>&amp;</td></tr><tr><th>c</th><td>2</td><td>3</td></tr></tbody></table></div>"
    )
    assert facts.table([("a", 1)]) == (
        '<div class="wide"><table><tbody><tr><th>a</th><td>1</td></tr></tbody></table></div>'
    )
    assert facts.table([], ("a", "b")) == ""


def test_the_overview_shows_key_values_with_their_units_and_leaves_out_unknown_ones(tmp_path: Path) -> None:
    lines = [
        {"step": 1, "loss": 2.0, "tokens": 500, "tokens_per_second": 100.0, "eval/loss": 3.0, "mfu": 0.25},
        {"step": 1200, "loss": 2.51234, "tokens": 7500, "tokens_per_second": 2.0, "eval/loss": 3.5},
    ]
    page = facts.overview({"a": record(tmp_path, lines, job={"steps": 5000}, saved=1000)})
    rows = {
        "status": "stopped",
        "steps": "1,200 of 5,000",
        "loss": "2.512",
        "best loss": "2",
        "evaluation": "3.5",
        "best evaluation": "3",
        "tokens": "7,500",
        "tokens/s": "2",
        "MFU": "25.0%",
        "trained": "58 min 25 s",
        "newest checkpoint": "step 1,000",
    }
    assert page == facts.table(list(rows.items()))


def test_the_overview_of_two_runs_has_a_column_for_each_and_the_error_of_the_one_that_failed(tmp_path: Path) -> None:
    lines = [{"step": 2, "memory/allocated_gib": 3.0, "memory/reserved_gib": 4.0, "memory/resident_gib": 5.0}]
    failed = record(tmp_path / "a", lines, error="no space left")
    finished = record(
        tmp_path / "b",
        error="earlier",
        ending={"steps": 9},
        lines=[{"step": 3, "memory/resident_gib": 6.0}],
        job={"epochs": 1},
    )
    page = facts.overview({"first": failed, "second": finished})
    rows = [
        ("status", "failed", "finished"),
        ("steps", "2 of 10", "3 of 9"),
        ("memory, GiB", "4", "6"),
        ("trained", "0 s", "0 s"),
        ("error", "no space left", ""),
    ]
    assert page == facts.table(rows, ("", "first", "second"))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(59.4, "59 s"), (60, "1 min 00 s"), (3599, "59 min 59 s"), (3600, "1 h 00 min"), (90_061, "25 h 01 min")],
)
def test_durations_have_two_units(tmp_path: Path, seconds: float, text: str) -> None:
    lines = [{"step": 1, "tokens": seconds, "tokens_per_second": 1.0}]
    assert f"<tr><th>trained</th><td>{text}</td></tr>" in facts.overview({"a": record(tmp_path, lines)})


def test_differences_name_the_fields_and_the_value_of_each_run(tmp_path: Path) -> None:
    jobs = [{"seed": 0, "optimizer": {"lr": 0.1}}, {"seed": 0, "optimizer": {"lr": 0.2}, "note": "x"}]
    runs = {name: record(tmp_path, job=job) for name, job in zip("ab", jobs, strict=True)}
    rows = [("optimizer.lr", "0.1", "0.2"), ("note", "", "x")]
    assert facts.differences(runs) == facts.table(rows, ("", "a", "b"))
    assert facts.differences({"a": runs["a"]}) == "<p>The jobs are the same.</p>"


def test_the_layout_shows_axes_strategies_and_processes(tmp_path: Path) -> None:
    (tmp_path / "startup.json").write_text(json.dumps({"processes": 8}))
    job = {
        "mesh": {"pp": 2, "dp_shard": 4},
        "parallel": [{"name": "fsdp", "reshard": True, "extra": None, "list": []}, {"name": "cp"}],
        "batch": {"microbatch": 2, "size": 8},
        "precision": {},
        "device": "cpu",
        "optimizer": {"name": "adamw"},
    }
    rows = [
        ("device", "cpu"),
        ("mesh", "pp 2  dp_shard 4"),
        ("parallel", "fsdp  reshard true"),
        ("", "cp"),
        ("batch", "microbatch 2, size 8"),
        ("processes", 8),
    ]
    assert facts.layout(record(tmp_path, job=job)) == facts.table(rows)
    assert facts.layout(record(tmp_path / "other", job={})) == ""


def test_facts_of_the_data_are_rows(tmp_path: Path) -> None:
    data = {"samples": 5451, "unigram_entropy": 6.3419, "parts": [{"dataset": "text"}]}
    (tmp_path / "startup.json").write_text(json.dumps({"data": data}))
    assert facts.data(record(tmp_path)) == (
        '<div class="wide"><table><tbody><tr><th>samples</th><td>5,451</td></tr>'
        "<tr><th>unigram entropy</th><td>6.342</td></tr>"
        "<tr><th>parts 1: dataset</th><td>text</td></tr></tbody></table></div>"
    )


def test_start_up_has_a_bar_for_each_phase_and_their_sum(tmp_path: Path) -> None:
    phases = [{"name": "plan<", "wall": 1.5}, {"name": "load", "wall": 3}, {"name": "odd", "wall": "?"}, "damaged"]
    (tmp_path / "startup.json").write_text(json.dumps({"phases": phases}))
    assert facts.start_up(record(tmp_path)) == (
        '<div class="wide"><table>'
        '<tr><th>plan&lt;</th><td>1.50 s</td><td class="bar"><i style="width:50.0%"></i></td></tr>'
        '<tr><th>load</th><td>3.00 s</td><td class="bar"><i style="width:100.0%"></i></td></tr>'
        "<tr><th>all</th><td>4.50 s</td><td></td></tr></table></div>"
    )


@pytest.mark.parametrize(
    ("phases", "width"),
    [
        ([{"name": "a", "wall": 0}], "0.0%"),
        ([{"name": "a", "wall": -1}, {"name": "b", "wall": 2}], "0.0%"),
    ],
)
def test_bars_of_start_up_stay_between_none_and_all(tmp_path: Path, phases: list[object], width: str) -> None:
    (tmp_path / "startup.json").write_text(json.dumps({"phases": phases}))
    assert f'<i style="width:{width}"></i>' in facts.start_up(record(tmp_path))


@pytest.mark.parametrize(
    "content", ["", "[]", "{", '{"phases": {}, "environment": [], "plugins": 1, "processes": "8"}']
)
def test_sections_without_or_with_damaged_files_are_empty(tmp_path: Path, content: str) -> None:
    if content:
        (tmp_path / "startup.json").write_text(content)
        (tmp_path / "plugins.json").write_text(content)
    run = record(tmp_path, job={})
    assert facts.data(run) == ""
    assert [facts.start_up(run), facts.plugins(run), facts.environment(run), facts.layout(run)] == [""] * 4


def test_plugins_have_versions_and_the_beginning_of_their_hashes(tmp_path: Path) -> None:
    found = {
        "d9d-hello": {"version": "1.2.3", "editable": False, "sha256": "0123456789abcdef"},
        "mine": {"editable": True, "sha256": None},
        "odd": "text",
    }
    (tmp_path / "plugins.json").write_text(json.dumps({"plugins": found}))
    rows = [("d9d-hello", "1.2.3", "", "0123456789ab"), ("mine", "", "editable", "")]
    assert facts.plugins(record(tmp_path)) == facts.table(rows, ("plugin", "version", "", "SHA-256"))


def test_the_environment_is_a_table_of_what_the_start_recorded(tmp_path: Path) -> None:
    (tmp_path / "startup.json").write_text(json.dumps({"environment": {"torch": "2.13.0", "device": "cpu"}}))
    assert facts.environment(record(tmp_path)) == facts.table([("torch", "2.13.0"), ("device", "cpu")])


def test_the_job_is_shown_as_yaml_with_letters_as_they_are(tmp_path: Path) -> None:
    page = facts.job(record(tmp_path, job={"run": {"name": "é<"}, "steps": 3}))
    assert "<pre>run:\n  name: é&lt;\nsteps: 3\n</pre>" in page
