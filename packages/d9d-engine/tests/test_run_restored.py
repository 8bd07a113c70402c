"""Start of a run from a checkpoint, and pictures of tables. Collaborators are stand-ins."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from d9d_core.metric import Table
from d9d_engine.run import life_cycle as module
from d9d_engine.run.checkpointer import Progress
from d9d_engine.run.life_cycle import LifeCycle
from d9d_engine.supervision.compilation import _most_informative
from d9d_engine.trackers import picture_table


class Run:
    """A life cycle at a step of a run, with its calls."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        step: int,
        reason: str = "",
        deterministic: bool = False,
        device: str = "cpu",
        before: dict[str, Any] | None = None,
    ) -> None:
        self.did: list[Any] = []
        progress = Progress(step)
        progress.trained_by = before if before is not None else {"mesh": {"dp_shard": 2, "ep": 2}}

        @contextmanager
        def noted(name: str) -> Any:
            self.did.append(name)
            yield
            self.did.append(f"end of {name}")

        checkpointer = SimpleNamespace(
            store=SimpleNamespace(opened=lambda: noted("store")),
            restore=lambda: (progress, "tracker states"),
            record=lambda *given: self.did.append(("recorded", *given)),
        )
        parts: Any = SimpleNamespace(
            topology=SimpleNamespace(
                watchdog=SimpleNamespace(phase=lambda *given: self.did.append(given)),
                device=torch.device(device),
                world_size=2,
            ),
            checkpointer=checkpointer,
            profiler=SimpleNamespace(
                close=lambda: self.did.append("profiler closed"),
                check=lambda *given: self.did.append(("profiled", *given)),
            ),
            job=SimpleNamespace(deterministic=deterministic),
            step=SimpleNamespace(shared=None),
            total_steps=9,
            reason_to_end=reason,
            note=self.did.append,
            trackers=SimpleNamespace(open=lambda *given: self.did.append(("trackers", *given))),
        )
        for name in ("built_objects_spared", "exits_are_errors"):
            monkeypatch.setattr(module, name, nullcontext)
        monkeypatch.setattr(module, "generators_kept", lambda _device: nullcontext())
        monkeypatch.setattr(module, "deterministic_algorithms", lambda on: noted(f"deterministic {on}"))
        of_run = SimpleNamespace(
            collection=SimpleNamespace(paced=lambda: noted("paced")),
            compilation=SimpleNamespace(listening=lambda: noted("listening")),
        )
        monkeypatch.setattr(module, "OpenRun", lambda *given: of_run.__dict__.update(given=given) or of_run)
        cycle: Any = LifeCycle.__new__(LifeCycle)
        cycle._parts, cycle.started, cycle.run = parts, False, None
        cycle._prefetching = lambda: noted("prefetching")
        cycle._run_info = lambda step: f"run at {step}"
        self.run, self.progress = cycle.restored(True), progress
        assert self.run.given == (parts, progress, True)
        assert cycle.started
        assert cycle.run is self.run
        texts = [one for one in self.did if isinstance(one, str)]
        self.notes = [one for one in texts if ":" in one or one.startswith("resumed")]


@pytest.mark.parametrize(
    ("step", "reason", "notes", "trains"),
    [
        (0, "", [], True),
        (3, "", ["resumed at step 3 of 9"], True),
        (8, "", ["resumed at step 8 of 9"], True),
        (9, "", ["nothing left to train: the checkpoint is at step 9, the job has 9 steps"], False),
        (3, "early stop", ["nothing left to train: the run ended at step 3 of 9, early stop"], False),
    ],
)
def test_a_run_says_where_it_goes_on_or_why_it_does_not(
    monkeypatch: pytest.MonkeyPatch, step: int, reason: str, notes: list[str], trains: bool
) -> None:
    run = Run(monkeypatch, step, reason or None)
    assert run.notes == notes
    assert ("recorded", step, trains) in run.did
    assert ("profiled", step, 9) in run.did
    assert ("trackers", f"run at {step}", "tracker states") in run.did
    assert run.progress.trained_by == (None if trains else {"mesh": {"dp_shard": 2, "ep": 2}})
    order = ["prefetching", "store", "deterministic False", "paced", "listening"]
    assert [one for one in run.did if one in order] == order
    run.run.owned.close()
    assert run.did[-6:] == [
        "end of listening", "end of paced", "end of deterministic False", "profiler closed", "end of store",
        "end of prefetching",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("mesh", "told"),
    [
        ({"dp_shard": 4, "tp": 2, "ep": 4}, ", on 2 processes instead of 8"),
        ({}, ", on 2 processes instead of 1"),
        ({"tp": 2}, ""),
        ({"dp_shard": "auto"}, ""),
        ("unknown", ""),
    ],
)
def test_a_run_on_another_number_of_processes_says_so(monkeypatch: pytest.MonkeyPatch, mesh: Any, told: str) -> None:
    assert Run(monkeypatch, 3, before={"mesh": mesh}).notes == [f"resumed at step 3 of 9{told}"]


@pytest.mark.parametrize(
    ("deterministic", "device", "warned"), [(True, "meta", True), (True, "cpu", False), (False, "meta", False)]
)
def test_deterministic_algorithms_are_a_warning_except_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, deterministic: bool, device: str, warned: bool
) -> None:
    run = Run(monkeypatch, 0, None, deterministic, device)
    assert run.notes == ["warning: deterministic: deterministic algorithms may be slower"] * warned


# --- pictures of tables -----------------------------------------------------------------------------------------------


class Axis:
    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.xaxis, self.yaxis = SimpleNamespace(), SimpleNamespace()

    def __getattr__(self, name: str) -> Any:
        return lambda *given, **more: self.calls.append((name, given, more)) or name


def table(rows: int, columns: int, **more: Any) -> Table:
    return Table(torch.ones(rows, columns), row="layer", column="expert", unit="load", **more)


@pytest.mark.parametrize("cells", [(1, 1), (4, 8), (64, 8), (500, 500)])
def test_a_picture_has_the_size_of_its_tables_within_limits(
    monkeypatch: pytest.MonkeyPatch, cells: tuple[int, int]
) -> None:
    rows, columns = cells
    left, right = Axis(), Axis()
    seen: dict[str, Any] = {"labels": []}
    figure = SimpleNamespace(
        subplots=lambda *given, **more: (left, right),
        colorbar=lambda mesh, ax, **more: seen.update(mesh=mesh, ax=ax, bar=more),
        suptitle=lambda title: seen.update(title=title),
    )
    monkeypatch.setattr(picture_table, "new_figure", lambda *size: seen.update(size=size) or figure)
    monkeypatch.setattr(picture_table, "figure_svg", lambda _figure: "svg")
    monkeypatch.setattr(picture_table, "write_text", lambda *given: seen.update(written=given))
    monkeypatch.setattr(picture_table, "_colours", lambda _history: {"cmap": "x"})
    monkeypatch.setattr(picture_table, "_label", lambda axis, names, room: seen["labels"].append((len(names), room)))
    history: Any = SimpleNamespace(last=table(rows, columns), mean=table(rows, columns), steps=3, last_step=70)
    picture_table.draw_table(history, Path("x.svg"), "a table")
    (low_w, high_w), (low_h, high_h) = picture_table._WIDTH, picture_table._HEIGHT
    width = min(max(columns * picture_table._CELL, low_w), high_w)
    height = min(max(rows * picture_table._CELL, low_h), high_h)
    assert seen["size"] == (pytest.approx(2 * width + 2.2), pytest.approx(height + 1.3))
    assert seen["labels"] == [(columns, round(width / 0.4)), (rows, round(height / 0.3))] * 2
    for axis, label in ((left, "mean of 3 logged steps"), (right, "step 70")):
        names = {call[0]: call for call in axis.calls}
        assert names["pcolormesh"][2] == {"cmap": "x", "rasterized": rows * columns > 1500}
        assert names["set_title"][1] == (label,)
        assert names["set_xlabel"][1] == ("expert",)
    assert ("set_ylabel", ("layer",), {}) in left.calls
    assert ("invert_yaxis", (), {}) in left.calls
    assert (seen["ax"], seen["bar"], seen["title"]) == ([left, right], {"label": "load", "pad": 0.02}, "a table")
    assert seen["written"] == (Path("x.svg"), "svg")


@pytest.mark.parametrize(
    ("cells", "room", "ticks"), [(4, 4, [0, 1, 2, 3]), (5, 4, [0, 2, 4]), (9, 4, [0, 4, 8]), (3, 1, [0]), (4, 1, [0])]
)
def test_labels_are_at_even_steps_from_the_first_cell(cells: int, room: int, ticks: list[int]) -> None:
    set_: list[Any] = []
    axis: Any = SimpleNamespace(set_ticks=lambda *given: set_.append(given))
    names = [f"cell {index}" for index in range(cells)]
    picture_table._label(axis, names, room)
    assert set_ == [([tick + 0.5 for tick in ticks], [f"cell {tick}" for tick in ticks])]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("values", "neutral", "norm"),
    [
        ([1.0, 5.0], None, (1.0, None, 5.0)),
        ([1.0, 5.0], 2.0, (0.0, 2.0, 5.0)),
        ([1.0, 1.5], 2.0, (0.0, 2.0, 4.0)),
        ([-7.0, 1.0], 2.0, (-7.0, 2.0, 11.0)),
        ([0.0, 0.0], 0.0, (0.0, 0.0, 1.0)),
        ([float("nan")] * 2, None, (0.0, None, 1.0)),
        ([float("nan"), 3.0], None, (3.0, None, 3.0)),
    ],
)
def test_colours_are_around_the_neutral_value(values: list[float], neutral: float | None, norm: Any) -> None:
    pytest.importorskip("matplotlib")
    one = Table(torch.tensor([values]), row="a", column="b", unit="c", neutral=neutral)
    history: Any = SimpleNamespace(mean=one, last=one)
    if norm == (0.0, 0.0, 1.0):
        assert picture_table._range(one) == (0.0, 0.0)
        return
    found = picture_table._colours(history)
    assert found["cmap"] == ("viridis" if neutral is None else "RdBu_r")
    of = found["norm"]
    assert (of.vmin, getattr(of, "vcenter", None), of.vmax) == norm


def test_the_cause_of_a_recompilation_is_not_another_mode_of_gradients_if_there_is_another_cause() -> None:
    assert _most_informative(("0/0: GLOBAL_STATE changed: grad_mode", "0/1: size of x", "0/2: y")) == "0/1: size of x"
    assert _most_informative(("0/0: GLOBAL_STATE changed: grad_mode",)) == "0/0: GLOBAL_STATE changed: grad_mode"


def test_the_range_of_colours_is_that_of_all_values_that_are_numbers() -> None:
    nan = float("nan")
    first, second = (Table(torch.tensor([values])) for values in ([nan, 3.0, -2.0], [5.0, nan, nan]))
    assert picture_table._range(first, second) == (-2.0, 5.0)
    assert picture_table._range(Table(torch.tensor([[nan]]))) == (0.0, 1.0)
