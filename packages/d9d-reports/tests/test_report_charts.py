"""Charts of a report: series, tables and timelines, as plotly gets them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from d9d_core.program.text import parse_programs
from d9d_reports.report.series import Chart, series_charts, thinned
from d9d_reports.report.tables import table_charts
from d9d_reports.report.timeline import ideal_boxes, timeline_charts
from d9d_reports.runs.record import RunRecord

PROGRAMS = "F0.0 F0.1 B0.0 R<0.1 B0.1 R0\nF1.0 B1.0 F1.1 S<1.1 B1.1 R1\n"


def record(lines: Sequence[Mapping[str, Any]], job: Mapping[str, Any] | None = None) -> RunRecord:
    """Record of a run with some logged lines."""
    return RunRecord(Path("run"), job or {}, lines, 0)


def by_title(charts: Sequence[Chart]) -> dict[str, Chart]:
    return {chart.title: chart for chart in charts}


def test_a_thinned_curve_keeps_its_ends_and_its_extremes() -> None:
    points = [(step, 0.0) for step in range(102)]
    points[30], points[31], points[77] = (30, 5.0), (31, -5.0), (77, 9.0)
    kept = thinned(points, 6)
    assert len(kept) <= 6
    assert [kept[0], kept[-1]] == [points[0], points[-1]]
    assert {points[30], points[31], points[77]} <= set(kept)
    assert list(kept) == sorted(kept)


def test_a_curve_of_few_points_stays_as_it_is() -> None:
    points = [(step, float(step % 3)) for step in range(6)]
    assert thinned(points, 6) == points
    assert thinned(points, 5) != points


def test_each_stretch_of_a_thinned_curve_has_its_own_extremes() -> None:
    inner = [(1, 1.0), (2, 3.0), (3, 2.0), (4, 7.0), (5, 9.0), (6, 8.0)]
    assert thinned([(0, 0.0), *inner, (7, 0.0)], 6) == [(0, 0.0), inner[0], inner[1], inner[3], inner[4], (7, 0.0)]


def test_charts_have_the_most_important_series_first_and_the_others_by_name() -> None:
    line = {
        "step": 1, "zeta": 1.0, "alpha": 2.0, "mfu": 0.4, "loss": 3.0, "lr": 0.1, "tokens": 9, "grad_norm": 1.0,
        "tokens_per_second": 5.0, "memory/reserved_gib": 1.0, "eval/loss": 2.0, "eval": 1.0, "text": "x",
        "loss/aux": 1.0, "bad": math.inf,
    }  # fmt: skip
    charts = series_charts({"a": record([line])})
    assert [chart.title for chart in charts] == [
        "loss", "learning rate", "norm of the gradients", "throughput, tokens/s", "model FLOPs utilisation (MFU)",
        "memory, GiB", "alpha", "eval", "parts of the loss", "zeta",
    ]  # fmt: skip
    assert [trace["name"] for trace in charts[0].traces] == ["loss", "eval/loss"]
    assert (charts[0].height, charts[1].height) == (380, 280)
    assert charts[4].layout["yaxis"]["tickformat"] == ".1%"
    assert "tickformat" not in charts[0].layout["yaxis"]


def test_a_measured_set_shares_the_chart_of_its_series() -> None:
    lines = [{"step": 1, "eval/books/loss": 1.0, "eval/other/score": 2.0, "eval/books": 3.0}]
    charts = by_title(series_charts({"a": record(lines, {"evaluation": {"sets": {"books": {}}}})}))
    assert {title: [trace["name"] for trace in chart.traces] for title, chart in charts.items()} == {
        "loss": ["eval/books/loss"],
        "books": ["eval/books"],
        "other": ["eval/other/score"],
    }


def test_a_curve_has_its_points_and_names_that_plotly_takes_literally() -> None:
    lines = [{"step": 1, "a<b>": 1.23456789}, {"step": 3, "a<b>": 2.0}]
    (chart,) = series_charts({"run": record(lines)})
    (trace,) = chart.traces
    assert (trace["x"], trace["y"]) == ([1, 3], [1.23457, 2.0])
    assert (trace["name"], trace["legendgroup"], trace["showlegend"]) == ("a&lt;b&gt;", "a&lt;b&gt;", True)
    assert trace["hovertemplate"] == "%{y:.5g} at step %{x}<extra>a&lt;b&gt;</extra>"
    assert (chart.layout["showlegend"], chart.note) == (False, "")
    assert chart.layout["xaxis"] == {"title": {"text": "step"}}


@pytest.mark.parametrize(("count", "mode"), [(60, "lines+markers"), (61, "lines")])
def test_short_curves_have_markers(count: int, mode: str) -> None:
    (chart,) = series_charts({"run": record([{"step": step, "loss": step} for step in range(count)])})
    assert chart.traces[0]["mode"] == mode


@pytest.mark.parametrize(("value", "shown"), [(2.0, [0.0, 4.0]), (-2.0, [-4.0, 0.0])])
def test_a_constant_curve_is_in_the_middle_of_a_range_from_zero(value: float, shown: list[float]) -> None:
    (chart,) = series_charts({"run": record([{"step": step, "x": value} for step in (1, 2)])})
    assert chart.layout["yaxis"] == {"range": shown}


@pytest.mark.parametrize("values", [(0.0, 0.0), (1.0, 2.0)])
def test_other_curves_leave_the_range_to_plotly(values: tuple[float, float]) -> None:
    (chart,) = series_charts({"run": record([{"step": step, "x": value} for step, value in enumerate(values)])})
    assert chart.layout["yaxis"] == {}


def test_runs_have_colours_and_their_series_dashes() -> None:
    lines = [{"step": 1, "loss": 1.0, "eval/loss": 2.0}]
    (chart,) = series_charts({"a": record(lines), "b": record(lines)})
    lines_of = [(trace["name"], trace["line"]["dash"], trace["showlegend"]) for trace in chart.traces]
    assert lines_of == [("a", "solid", True), ("a", "dash", False), ("b", "solid", True), ("b", "dash", False)]
    colours = [trace["line"]["color"] for trace in chart.traces]
    assert colours[0] == colours[1] != colours[2] == colours[3]
    assert "<extra>a: eval/loss</extra>" in chart.traces[1]["hovertemplate"]
    assert (chart.note, chart.layout["showlegend"]) == ("loss solid, eval/loss dashed", True)


def test_two_runs_with_one_series_need_no_names_of_series() -> None:
    (chart,) = series_charts({"a": record([{"step": 1, "loss": 1.0}]), "b": record([{"step": 1, "loss": 2.0}])})
    assert [trace["hovertemplate"].partition("<extra>")[2] for trace in chart.traces] == ["a</extra>", "b</extra>"]
    assert chart.note == ""


def test_series_of_one_run_have_different_colours() -> None:
    (chart,) = series_charts({"a": record([{"step": 1, "loss": 1.0, "eval/loss": 2.0}])})
    assert len({trace["line"]["color"] for trace in chart.traces}) == 2
    assert {trace["line"]["dash"] for trace in chart.traces} == {"solid"}


def test_a_chart_says_how_many_series_it_leaves_out() -> None:
    line = {"step": 1} | {f"group/{number}": 1.0 for number in range(18)}
    (chart,) = series_charts({"a": record([line])})
    assert (len(chart.traces), chart.note) == (16, "2 further series of this group are in metrics.jsonl")
    (chart,) = series_charts({"a": record([line]), "b": record([{"step": 1}])})
    assert len(chart.traces) == 18


def test_a_page_has_at_most_400_curves_and_60000_points() -> None:
    names = [f"g{group}/{number}" for group in range(26) for number in range(16)]
    charts = series_charts({"a": record([{"step": step} | dict.fromkeys(names, step % 2) for step in range(200)])})
    assert sum(len(chart.traces) for chart in charts) == 400
    assert {len(trace["x"]) for chart in charts for trace in chart.traces} == {150}


def test_a_single_curve_has_at_most_1500_points_and_one_of_many_at_least_40() -> None:
    lines = [{"step": step, "loss": float(step % 7)} for step in range(4000)]
    (chart,) = series_charts({"a": record(lines)})
    assert 1400 < len(chart.traces[0]["x"]) <= 1500


def table_line(step: int, values: list[list[float | None]], **changes: Any) -> dict[str, Any]:
    labels = {"row": "layer<", "column": "expert", "unit": "load", "neutral": 1.0, "rows": ["first", "<b>"]}
    return {"step": step, "table": "router/load", **labels, "values": values} | changes


def charts_of(directory: Path, *lines: dict[str, Any]) -> list[Chart]:
    (directory / "tables.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return table_charts({"a": directory})


def test_a_table_has_a_heat_map_of_its_mean_and_of_its_last_step(tmp_path: Path) -> None:
    mean, last = charts_of(
        tmp_path, table_line(5, [[1.0, 2.0], [1.0, None]]), table_line(9, [[3.0, 0.123456], [1.5, None]])
    )
    assert (mean.title, last.title) == ("router/load, mean of 2 logged steps", "router/load, step 9")
    assert mean.traces[0]["z"] == [[2.0, 1.062], [1.25, None]]
    assert last.traces[0]["z"] == [[3.0, 0.1235], [1.5, None]]
    trace = last.traces[0]
    assert trace["y"] == ["first", "&lt;b&gt;"]
    assert trace["hovertemplate"] == "layer&lt; %{y}, expert %{x}: %{z}<extra></extra>"
    assert trace["colorbar"]["title"]["text"] == "load"
    assert (last.layout["xaxis"]["title"]["text"], last.layout["yaxis"]["title"]["text"]) == ("expert", "layer&lt;")


@pytest.mark.parametrize(
    ("values", "neutral", "low", "high"),
    [
        ([[1.1, 0.9]], 1.0, 0.0, 2.0),  # at least twice the neutral value
        ([[4.0, 0.5]], 1.0, -2.0, 4.0),
        ([[-3.0, 1.0]], 1.0, -3.0, 5.0),
        ([[0.0, 0.0]], 0.0, -1.0, 1.0),
        ([[2.0, -1.0]], 0.0, -2.0, 2.0),
        ([[2.0, -1.0]], None, -1.0, 2.0),
        ([[None, None]], None, 0.0, 1.0),
        ([[-1.0, -1.2]], -1.0, -2.0, 0.0),
    ],
)
def test_colours_are_symmetric_around_the_neutral_value(
    tmp_path: Path, values: list[list[float | None]], neutral: float | None, low: float, high: float
) -> None:
    _, chart = charts_of(tmp_path, table_line(1, values, neutral=neutral, rows=["a"]))
    assert (chart.traces[0]["zmin"], chart.traces[0]["zmax"]) == (low, high)
    assert (chart.traces[0]["colorscale"] == "Viridis") == (neutral is None)


def test_both_heat_maps_of_a_table_share_their_range(tmp_path: Path) -> None:
    charts = charts_of(
        tmp_path, table_line(1, [[1.0]], neutral=None, rows=["a"]), table_line(2, [[3.0]], neutral=None, rows=["a"])
    )
    assert [(chart.traces[0]["zmin"], chart.traces[0]["zmax"]) for chart in charts] == [(2.0, 3.0)] * 2


def test_rows_without_names_are_numbered_and_many_cells_have_no_gaps(tmp_path: Path) -> None:
    names = [chart.traces[0] for chart in charts_of(tmp_path, table_line(1, [[1.0] * 64] * 3, rows=[]))]
    assert names[0]["y"] == ["0", "1", "2"]
    assert (names[0]["xgap"], names[0]["ygap"]) == (1, 1)
    wide = charts_of(tmp_path, table_line(1, [[1.0] * 65] * 65, rows=[]))[0]
    assert (wide.traces[0]["xgap"], wide.traces[0]["ygap"]) == (0, 0)
    tall = charts_of(tmp_path, table_line(1, [[1.0]] * 64, rows=[]))[0]
    assert (tall.traces[0]["ygap"], tall.height) == (1, 640)
    assert charts_of(tmp_path, table_line(1, [[1.0]] * 10, rows=[]))[0].height == 360
    assert charts_of(tmp_path, table_line(1, [[1.0]], rows=[]))[0].height == 220


def test_tables_beyond_the_room_of_a_page_are_named_with_their_size(tmp_path: Path) -> None:
    large, rest = [[1.0] * 150] * 200, [[1.0]]
    charts = charts_of(tmp_path, table_line(1, large, rows=[]), table_line(1, rest, rows=[], table="other"))
    assert [(chart.title, bool(chart.traces), chart.note) for chart in charts] == [
        ("router/load, mean of 1 logged steps", True, ""),
        ("router/load, step 1", True, ""),
        ("other", False, "too large for a page: 1 cells; see tables.jsonl"),
    ]


def test_tables_of_several_runs_are_named_by_their_runs_and_damaged_files_are_told(tmp_path: Path) -> None:
    (tmp_path / "good").mkdir()
    (tmp_path / "bad").mkdir()
    (tmp_path / "good" / "tables.jsonl").write_text(json.dumps(table_line(1, [[1.0]], rows=["a"])) + "\n")
    (tmp_path / "bad" / "tables.jsonl").write_text('{"step": 1, "table": "x"}\n')
    charts = table_charts({"b": tmp_path / "bad", "g": tmp_path / "good", "none": tmp_path / "none"})
    assert charts[0].title == "Tables"
    assert charts[0].note.startswith(f"{tmp_path / 'bad' / 'tables.jsonl'} is damaged: KeyError: ")
    assert [chart.title for chart in charts[1:]] == [
        "g: router/load, mean of 1 logged steps", "g: router/load, step 1",
    ]  # fmt: skip


def test_computations_start_as_soon_as_their_inputs_exist() -> None:
    boxes = ideal_boxes(parse_programs(PROGRAMS))
    found = {(box.rank, str(box.action)): (box.begin, box.begin + box.length) for box in boxes}
    assert found == {
        (0, "F0.0"): (0, 1), (0, "F0.1"): (1, 2), (1, "F1.0"): (1, 2), (1, "B1.0"): (2, 4), (1, "F1.1"): (4, 5),
        (0, "B0.0"): (4, 6), (1, "B1.1"): (5, 7), (0, "B0.1"): (7, 9),
    }  # fmt: skip


def test_input_gradients_pass_on_before_weight_gradients_are_computed() -> None:
    boxes = ideal_boxes(parse_programs("F0.0 I0.0 W0.0 R0\nF1.0 I1.0 W1.0 R1\n"))
    found = {str(box.action): (box.begin, box.length) for box in boxes}
    assert found == {
        "F0.0": (0, 1), "F1.0": (1, 1), "I1.0": (2, 1), "W1.0": (3, 1), "I0.0": (3, 1), "W0.0": (4, 1),
    }  # fmt: skip


def test_computations_in_a_deadlock_are_left_out() -> None:
    boxes = ideal_boxes(parse_programs("F0.0 B0.0 F0.1 B0.1\nF1.1 F1.0 B1.0 B1.1\n"))
    assert [(box.rank, str(box.action), box.begin, box.length) for box in boxes] == [(0, "F0.0", 0.0, 1)]


def test_a_timeline_has_a_bar_for_each_computation_and_says_how_much_time_is_idle(tmp_path: Path) -> None:
    (tmp_path / "programs.txt").write_text(PROGRAMS)
    (chart,) = timeline_charts({"a": tmp_path, "b": tmp_path / "none"})
    assert chart.title == "a: a step of the pipeline"
    (chart,) = timeline_charts({"a": tmp_path})
    assert (chart.title, chart.height) == ("A step of the pipeline", 220)
    forward, backward = chart.traces
    assert (forward["name"], backward["name"]) == ("forward", "backward")
    columns = [forward[name] for name in ("y", "base", "x", "text", "customdata")]
    assert list(zip(*columns, strict=True)) == [
        ("rank 0", 0.0, 1, "0", "F0.0"), ("rank 0", 1.0, 1, "1", "F0.1"),
        ("rank 1", 1.0, 1, "0", "F1.0"), ("rank 1", 4.0, 1, "1", "F1.1"),
    ]  # fmt: skip
    assert backward["x"] == [2, 2, 2, 2]
    assert re.findall(r"\S+ of the time is idle", chart.note) == [f"{1 - 12 / 18:.0%} of the time is idle"]
    assert forward["constraintext"] == "none"


def test_a_timeline_of_too_many_computations_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "programs.txt").write_text(" ".join(f"F0.{number}" for number in range(6001)) + "\n")
    (chart,) = timeline_charts({"a": tmp_path})
    assert chart.traces == []
    assert chart.note == "6,001 computations are too many for a page; see programs.txt"


def test_bars_of_many_computations_are_labelled_only_where_the_label_fits(tmp_path: Path) -> None:
    for count, fits in ((299, "none"), (300, "inside")):
        (tmp_path / "programs.txt").write_text(" ".join(f"F0.{number}" for number in range(count)) + "\n")
        (chart,) = timeline_charts({"a": tmp_path})
        assert chart.traces[0]["constraintext"] == fits


def test_the_height_of_a_timeline_follows_the_number_of_ranks(tmp_path: Path) -> None:
    for ranks, height in ((4, 278), (30, 900)):
        (tmp_path / "programs.txt").write_text("\n".join(f"F{rank}.0" for rank in range(ranks)) + "\n")
        assert timeline_charts({"a": tmp_path})[0].height == height
