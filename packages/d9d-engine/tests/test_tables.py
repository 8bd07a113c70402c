"""Tables on their way from a metric to files and pictures."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from d9d_core.events import StepResult
from d9d_core.metric import StageMetric, Table
from d9d_core.tracker import RunInfo, TakesTables
from d9d_engine.job import Job
from d9d_engine.run.logbook import Logbook
from d9d_engine.step.metrics import Statistics
from d9d_engine.trackers.config import ConsoleConfig, JsonlConfig
from d9d_engine.trackers.console import ConsoleTracker
from d9d_engine.trackers.hub import TrackerHub
from d9d_engine.trackers.jsonl import JsonlRun, JsonlTracker
from d9d_engine.trackers.tables import read_tables
from d9d_testing.toy.task import ToyMetric
from torch import Tensor, nn

LOAD = {"row": "layer", "column": "expert", "unit": "load / uniform", "neutral": 1.0}


def load(*rows: list[float]) -> Table:
    return Table(torch.tensor(rows, dtype=torch.float64), **LOAD)


def info(directory: Path, resumed_step: int = 0) -> RunInfo:
    return RunInfo("test", directory, "", {}, 10, resumed_step)


def opened(directory: Path, resumed_step: int = 0, picture: bool = False) -> JsonlRun:
    if picture:
        pytest.importorskip("matplotlib", reason="the extra 'plots'")
    return JsonlTracker(JsonlConfig(picture=picture)).open(info(directory, resumed_step), None)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# --- loop


def step_result() -> StepResult:
    one = torch.ones(())
    return StepResult(one, {"loss": one}, one, torch.tensor(True), one, torch.tensor(False))


def test_tables_are_logged_beside_the_values_of_their_step() -> None:
    values: dict[int, Mapping[str, float]] = {}
    tables: dict[int, Mapping[str, Table]] = {}
    logbook = Logbook(values.__setitem__, lambda *_: None, "error", write_tables=tables.__setitem__)
    wide, narrow = torch.arange(6.0).view(2, 3), torch.tensor([[7.0], [math.nan]])
    measured = {"a": Table(wide, **LOAD), "x": torch.tensor(3.0), "b": Table(narrow)}
    logbook.record(1, step_result(), {"lr": 0.5}, measured, seconds=0.5)
    logbook.record(2, step_result(), None)
    logbook.record(3, step_result(), {"lr": 0.5}, {"x": torch.tensor(4.0)})
    logbook.drain()
    assert values[1] == {"loss": 1, "grad_norm": 1, "x": 3, "tokens": 1, "tokens_per_second": 2, "lr": 0.5}
    assert list(tables) == [1]
    assert list(tables[1]) == ["a", "b"]
    assert torch.equal(tables[1]["a"].values, wide.double())
    assert tables[1]["b"].values.nan_to_num(-1).tolist() == [[7.0], [-1.0]]
    assert (tables[1]["a"].row, tables[1]["b"].row) == ("layer", "row")


def test_a_step_may_be_logged_without_anything_measured() -> None:
    values: dict[int, Mapping[str, float]] = {}
    Logbook(values.__setitem__, lambda *_: None, "error").record(1, step_result(), {"lr": 0.5})
    assert values[1].keys() == {"loss", "grad_norm", "lr", "tokens", "tokens_per_second"}


def test_nobody_needs_to_take_tables() -> None:
    values: dict[int, Mapping[str, float]] = {}
    logbook = Logbook(values.__setitem__, lambda *_: None, "error")
    logbook.record(1, step_result(), {}, {"load": load([1.0]), "x": torch.tensor(3.0)})
    assert values[1].keys() == {"loss", "grad_norm", "x", "tokens", "tokens_per_second"}


class Rows:
    """A metric with a row for each linear layer of the model."""

    reductions: Mapping[str, Any] = {"sums": "sum"}

    def attach(self, stage: nn.Module) -> None:
        self.sums = torch.zeros(sum(isinstance(m, nn.Linear) for m in stage.modules()), 2)

    def update(self, observations: Mapping[str, Tensor]) -> None:
        self.sums = self.sums + observations["x"]

    def compute(self) -> Mapping[str, Tensor | Table]:
        return {"rows": Table(self.sums), "loss": self.sums.sum()}

    def state(self) -> dict[str, Tensor]:
        return {"sums": self.sums}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        self.sums = state["sums"]

    def reset(self) -> None:
        self.sums = torch.zeros_like(self.sums)


def test_a_metric_that_wants_to_know_the_model_sees_it() -> None:
    metric = Rows()
    assert isinstance(metric, StageMetric)
    statistics = Statistics({"mine": metric}, gated=False)
    statistics.attach(nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1), nn.Linear(1, 1)))
    assert statistics.tensors()["mine/sums"].shape == (3, 2)
    statistics.update({"x": torch.tensor([5.0, 5.0])})  # it does not read the task's observations
    statistics.tally({"x": torch.tensor([1.0, 2.0])})
    computed = statistics.compute()
    assert computed.keys() == {"rows", "mine/loss"}
    assert isinstance(computed["rows"], Table)
    assert computed["rows"].values.tolist() == [[1, 2]] * 3


def test_such_a_metric_sees_the_whole_model_of_a_plan_too(
    job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[nn.Module] = []

    class Curious(ToyMetric):
        def attach(self, stage: nn.Module) -> None:
            seen.append(stage)

    monkeypatch.setattr("d9d_testing.toy.task.ToyMetric", Curious)
    plan = job().plan()
    assert len(seen) == 1
    assert seen[0] is plan.assembly.full_model


# --- trackers


class Plain:
    """A tracker and its run; takes no tables."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def open(self, *_: Any) -> Any:
        return self

    def write(self, *call: Any) -> None:
        self.calls.append(call)

    def flush(self) -> None: ...

    def state(self) -> dict[str, Any]:
        return {}

    def close(self, *_: Any) -> None: ...


class Tabular(Plain):
    def write_tables(self, *call: Any) -> None:
        self.calls.append(call)
        if call[0] == 2:
            raise OSError("disk full")


def test_only_trackers_that_take_tables_get_them(tmp_path: Path) -> None:
    plain, tabular, told = Plain(), Tabular(), []
    hub = TrackerHub({"plain": plain, "tabular": tabular}, told.append)  # type: ignore[dict-item]
    hub.open(info(tmp_path), {})
    tables = {"router/load": load([1.0, 2.0])}
    for step in (1, 2, 3):
        hub.write(step, {"loss": 1.0})
        hub.write_tables(step, tables)
    hub.close("finished")
    assert plain.calls == [(step, {"loss": 1.0}) for step in (1, 2, 3)]
    assert tabular.calls == [(1, {"loss": 1.0}), (1, tables), (2, {"loss": 1.0}), (2, tables)]
    assert len(told) == 1
    assert "'tabular' failed" in told[0]


def test_the_console_takes_no_tables(tmp_path: Path) -> None:
    assert not isinstance(ConsoleTracker(ConsoleConfig()).open(info(tmp_path), None), TakesTables)


def test_a_table_is_a_line_that_explains_itself(tmp_path: Path) -> None:
    run = opened(tmp_path)
    run.write_tables(3, {"router/load": load([1.23456, 0.0000123456], [math.nan, 12345.6])})
    assert lines(tmp_path / "tables.jsonl") == [
        {"step": 3, "table": "router/load", **LOAD, "values": [[1.235, 1.235e-05], [None, 12350.0]]}
    ]
    run.flush()
    run.close("finished")


@pytest.mark.smoke
def test_a_run_without_tables_leaves_no_file_of_them(tmp_path: Path) -> None:
    run = opened(tmp_path, picture=True)
    run.write(1, {"loss": 1.0})
    run.flush()
    run.close("finished")
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl", "loss.svg"}


def test_without_matplotlib_a_run_ends_with_one_line_that_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    run = JsonlTracker(JsonlConfig()).open(info(tmp_path), None)
    run.write(1, {"loss": 1.0})
    run.write_tables(1, {"t": load([1.0])})
    run.close("finished")
    assert re.fullmatch(
        rf"warning: {tmp_path}: no loss.svg: pictures need matplotlib.*pip install 'd9d-engine\[plots\]'\n",
        capfd.readouterr().err,
    )
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl", "tables.jsonl"}


def test_both_files_are_cut_back_to_the_resumed_step(tmp_path: Path) -> None:
    run = opened(tmp_path)
    for step in (1, 2, 3):
        run.write(step, {"loss": step})
        run.write_tables(step, {"t": load([step])})
    run.close("failed")
    for name in ("metrics.jsonl", "tables.jsonl"):
        with (tmp_path / name).open("ab") as file:
            file.write(b'{"step": 1, "torn": [[0.\xc3')
    run = opened(tmp_path, resumed_step=2)
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [1, 2]
    assert [line["step"] for line in lines(tmp_path / "tables.jsonl")] == [1, 2]
    run.write(5, {"loss": math.inf})
    run.write_tables(5, {"t": load([5.0])})
    run.close("finished")
    assert lines(tmp_path / "metrics.jsonl")[-1] == {"step": 5, "loss": None}
    assert [line["step"] for line in lines(tmp_path / "tables.jsonl")] == [1, 2, 5]
    opened(tmp_path).close("failed")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"metrics.jsonl": ""}


def test_the_mean_is_over_the_steps_that_have_a_value(tmp_path: Path) -> None:
    run = opened(tmp_path)
    run.write_tables(1, {"a": load([9.0]), "b": load([1.0])})
    run.write_tables(2, {"a": load([1.0, math.nan, math.nan])})
    run.write_tables(4, {"a": load([3.0, 5.0, math.nan])})
    run.close("finished")
    found = read_tables(tmp_path / "tables.jsonl")["a"]
    assert found.mean.values.nan_to_num(-1).tolist() == [[2.0, 5.0, -1.0]]
    assert found.last.values.nan_to_num(-1).tolist() == [[3.0, 5.0, -1.0]]
    assert (found.steps, found.last_step, found.last.unit) == (2, 4, "load / uniform")


@pytest.mark.thorough
@pytest.mark.parametrize(("rows", "columns"), [(4, 8), (94, 128), (1, 1)])
def test_tables_are_drawn_with_their_labels(tmp_path: Path, rows: int, columns: int) -> None:
    run = opened(tmp_path, picture=True)
    for step in (1, 7):
        values = 2 * torch.rand(rows, columns, generator=torch.Generator().manual_seed(step))
        values[0, 0] = math.nan
        run.write_tables(step, {"router/load": Table(values, **LOAD)})
    run.close("finished")
    drawn = (tmp_path / "router-load.svg").read_text()
    for label in ("layer", "expert", "load / uniform", "mean of 2 logged steps", "step 7", "test: router/load"):
        assert f"<!-- {label} -->" in drawn
    assert len(drawn) < 500_000


@pytest.mark.thorough
def test_rows_have_names_where_not_all_layers_have_one(tmp_path: Path) -> None:
    named = replace(load([1.0], [2.0]), rows=("3", "17"))
    run = opened(tmp_path, picture=True)
    for step in (1, 2, 3):
        run.write_tables(step, {"t": named})
    run.close("failed")
    run = opened(tmp_path, resumed_step=2, picture=True)
    run.write_tables(3, {"t": replace(named, values=named.values * 4)})
    run.close("finished")
    assert [line["rows"] for line in lines(tmp_path / "tables.jsonl")] == [["3", "17"]] * 3
    found = read_tables(tmp_path / "tables.jsonl")["t"]
    assert (found.steps, found.last.rows, found.mean.rows) == (3, named.rows, named.rows)
    assert found.mean.values.tolist() == [[2.0], [4.0]]
    drawn = (tmp_path / "t.svg").read_text()
    assert "<!-- 3 -->" in drawn
    assert "<!-- 17 -->" in drawn
    assert "<!-- 1 -->" not in drawn


def test_rows_with_other_names_are_no_history(tmp_path: Path) -> None:
    run = opened(tmp_path)
    for rows in (("0", "1"), ("1", "2")):
        run.write_tables(1, {"t": replace(load([1.0], [2.0]), rows=rows)})
    run.close("finished")
    found = read_tables(tmp_path / "tables.jsonl")["t"]
    assert (found.steps, found.last.rows) == (1, ("1", "2"))


def test_names_are_for_all_rows() -> None:
    with pytest.raises(ValueError, match="a table of 2 rows has 1 names for them"):
        replace(load([1.0], [2.0]), rows=("3",))


def test_many_named_rows_are_labelled_at_even_steps(tmp_path: Path) -> None:
    run = opened(tmp_path, picture=True)
    names = tuple(f"L{layer}" for layer in range(96))
    run.write_tables(1, {"t": Table(torch.ones(96, 2), rows=names)})
    run.close("finished")
    drawn = re.findall(r"<!-- (L\d+) -->", (tmp_path / "t.svg").read_text())
    assert drawn == [name for name in names if name in drawn]
    assert drawn[0] == "L0"
    assert len({int(after[1:]) - int(name[1:]) for name, after in pairwise(drawn)}) == 1


def test_a_table_without_any_value_is_drawn_too(tmp_path: Path) -> None:
    run = opened(tmp_path, picture=True)
    run.write_tables(1, {"t": load([math.nan, math.nan])})
    run.close("finished")
    assert "<!-- expert -->" in (tmp_path / "t.svg").read_text()


def test_a_table_without_a_neutral_value_is_drawn_too(tmp_path: Path) -> None:
    run = opened(tmp_path, picture=True)
    run.write_tables(1, {"plain": Table(torch.arange(6.0).view(2, 3))})
    run.close("finished")
    assert "<!-- column -->" in (tmp_path / "plain.svg").read_text()


@pytest.mark.parametrize(("most", "written"), [(0, [1, 2, 3]), (2, [1])])
def test_values_that_are_copied_from_a_device_are_written_so_many_steps_later(
    monkeypatch: pytest.MonkeyPatch, most: int, written: list[int]
) -> None:
    def copied(cells: list[Tensor]) -> tuple[Tensor, Any]:
        return torch.stack([cell.double() for cell in cells]), SimpleNamespace(synchronize=lambda: None)

    monkeypatch.setattr("d9d_engine.run.logbook._copied", copied)
    values: dict[int, Mapping[str, float]] = {}
    logbook = Logbook(values.__setitem__, lambda *_: None, "error", max_pending=most)
    for step in (1, 2, 3):
        logbook.record(step, step_result(), {})
    assert list(values) == written
    logbook.drain()
    assert list(values) == [1, 2, 3]
