"""Tables of a report about a run's layout, start-up, plugins and job."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from d9d_reports.report import facts
from d9d_reports.report.markup import folded, table
from d9d_reports.runs.record import RunRecord


def record(directory: Path, lines: list[Mapping[str, Any]] | None = None, **given: Any) -> RunRecord:
    """Record of a run without files."""
    values: dict[str, Any] = {"job": {"steps": 10}, "saved": 0, **given}
    return RunRecord(directory, values.pop("job"), lines or [], values.pop("saved"), **values)


def test_a_table_escapes_texts_and_has_a_title_in_each_row() -> None:
    page = table([("a<b", 1, "&"), ("c", 2, 3)], ("", "x>y", "z"))
    assert page == (
        '<div class="wide"><table><thead><tr><th scope="col"></th><th scope="col">x&gt;y</th><th scope="col">z</th>'
        '</tr></thead><tbody><tr><th scope="row">a&lt;b</th><td>1</td><td>&amp;</td></tr>'
        '<tr><th scope="row">c</th><td>2</td><td>3</td></tr></tbody></table></div>'
    )
    assert table([("a", 1)]) == (
        '<div class="wide"><table class="pairs"><tbody><tr><th scope="row">a</th><td>1</td></tr></tbody></table></div>'
    )
    assert table([], ("a", "b")) == ""


def test_a_folded_section_says_what_is_inside_and_escapes_it() -> None:
    assert folded("a<b", "c<d", "<p>e</p>") == (
        '<details><summary><b>a&lt;b</b> <span class="weak">c&lt;d</span></summary>\n<p>e</p>\n</details>'
    )


def test_differences_name_the_fields_and_the_value_of_each_run(tmp_path: Path) -> None:
    jobs = [{"seed": 0, "optimizer": {"lr": 0.1}}, {"seed": 0, "optimizer": {"lr": 0.2}, "note": "x"}]
    runs = {name: record(tmp_path, job=job) for name, job in zip("ab", jobs, strict=True)}
    rows = [("optimizer.lr", "0.1", "0.2"), ("note", "", "x")]
    assert facts.differences(runs) == table(rows, ("", "a", "b"))
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
    assert facts.layout(record(tmp_path, job=job)) == table(rows)
    assert facts.layout(record(tmp_path / "other", job={})) == ""


def test_facts_of_the_data_are_rows(tmp_path: Path) -> None:
    data = {"samples": 5451, "unigram_entropy": 6.3419, "parts": [{"dataset": "text"}]}
    (tmp_path / "facts.json").write_text(json.dumps({"data": data}))
    rows = [("samples", "5,451"), ("unigram entropy", "6.342"), ("parts 1: dataset", "text")]
    assert facts.data(record(tmp_path)) == table(rows)


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
        (tmp_path / "facts.json").write_text(content)
    run = record(tmp_path, job={})
    assert facts.data(run) == ""
    assert [facts.start_up(run), facts.used_plugins(run), facts.environment(run), facts.layout(run)] == [""] * 4


def test_plugins_are_those_of_the_job_with_their_components_and_versions(tmp_path: Path) -> None:
    installed = {
        "d9d-hello": {"version": "1.2.3", "editable": False, "sha256": ""},
        "mine.py": {"version": "", "editable": True, "sha256": "0123456789abcdef"},
        "d9d-other": {"version": "1.0", "editable": False, "sha256": ""},
        "odd": "text",
    }
    (tmp_path / "plugins.json").write_text(json.dumps({"plugins": installed}))
    used = {"d9d-hello": ["model a<b", "task b"], "mine.py": ["metric c"], "odd": 3}
    (tmp_path / "facts.json").write_text(json.dumps({"plugins": used}))
    rows = [
        ("d9d-hello", "model a<b, task b", "1.2.3"), ("mine.py", "metric c", "0123456789ab, editable"), ("odd", "", ""),
    ]  # fmt: skip
    assert facts.used_plugins(record(tmp_path)) == table(rows, ("plugin", "components in the job", "version"))


def test_all_installed_plugins_are_shown_without_a_record_of_the_used_ones(tmp_path: Path) -> None:
    (tmp_path / "plugins.json").write_text(json.dumps({"plugins": {"d9d-hello": {"version": "1.2.3"}}}))
    found = facts.used_plugins(record(tmp_path))
    assert found == table([("d9d-hello", "", "1.2.3")], ("plugin", "components in the job", "version"))


def test_the_environment_is_a_table_of_what_the_start_recorded(tmp_path: Path) -> None:
    (tmp_path / "startup.json").write_text(json.dumps({"environment": {"torch": "2.13.0", "device": "cpu"}}))
    assert facts.environment(record(tmp_path)) == table([("torch", "2.13.0"), ("device", "cpu")])


def test_the_job_is_shown_as_yaml_with_letters_as_they_are(tmp_path: Path) -> None:
    page = facts.job(record(tmp_path, job={"run": {"name": "é<"}, "steps": 3}))
    assert "<pre>run:\n  name: é&lt;\nsteps: 3\n</pre>" in page
