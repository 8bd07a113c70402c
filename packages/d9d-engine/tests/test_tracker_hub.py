"""Trackers that fail, exit or wait: none of them ends or delays the training."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from d9d_core.tracker import Histogram, RunInfo, SeriesName, split_tags
from d9d_engine.job import Job
from d9d_engine.trackers import hub as hub_module
from d9d_engine.trackers.backlog import Backlog
from d9d_engine.trackers.hub import TrackerHub
from d9d_testing.toy.observers import ToyTracker
from d9d_testing.toy.runs import noted

MakeJob = Callable[..., Job]


class Blocked:
    """Tracker whose writes wait until they may go on."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()
        self.entered = threading.Event()
        self.calls: list[Any] = []

    def open(self, *_: Any) -> Blocked:
        return self

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.entered.set()
        assert self.may_go_on.wait(60)
        self.calls.append(step)

    def flush(self) -> None:
        self.calls.append("flush")

    def state(self) -> dict[str, Any]:
        return {"writes": len(self.calls)}

    def close(self, status: str) -> None:
        self.calls.append(status)


@pytest.fixture
def blocked() -> Iterator[Blocked]:
    tracker = Blocked()
    yield tracker
    tracker.may_go_on.set()


def info(directory: Path) -> RunInfo:
    return RunInfo("run", directory, "", {}, 10, 0)


def test_a_tracker_that_waits_holds_nobody_up_and_is_reported_once(tmp_path: Path, blocked: Blocked) -> None:
    said: list[str] = []
    hub = TrackerHub({"slow": blocked, "other": (other := Blocked())}, said.append, patience=0.0)  # type: ignore[dict-item]
    other.may_go_on.set()
    hub.open(info(tmp_path), {"slow": {"writes": -1}})
    for step in range(5):
        hub.write(step, {"loss": 1.0})
    for _ in range(3):
        hub.flush()
        assert hub.state()["slow"] == {"writes": -1}  # the last that is known
    assert len([text for text in said if "'slow' has not written everything" in text]) == 1
    blocked.may_go_on.set()
    hub.close("finished")


def test_a_tracker_that_was_late_is_waited_for_long_only_after_it_has_answered_soon(
    tmp_path: Path, blocked: Blocked, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(hub_module.time, "monotonic", lambda: now)
    waits: list[float] = []
    real = threading.Event.wait

    def wait(event: threading.Event, timeout: float | None = None) -> bool:
        if threading.current_thread() is threading.main_thread() and timeout is not None:
            waits.append(round(timeout, 6))
            return real(event, 0.2 if blocked.may_go_on.is_set() else 0.0)
        return real(event, timeout)

    monkeypatch.setattr(threading.Event, "wait", wait)
    hub = TrackerHub({"slow": blocked}, lambda _: None, patience=10.0)  # type: ignore[dict-item]
    hub.open(info(tmp_path), {})
    (thread,) = hub._threads

    def checkpoint(seconds: float) -> list[float]:
        """Waits of a checkpoint whose flush is answered after some seconds."""
        nonlocal now
        waits.clear()
        blocked.may_go_on.clear()
        hub.write(1, {"loss": 1.0})
        hub.flush()
        now += seconds
        blocked.may_go_on.set()
        assert real(thread._asked, 60)
        return list(waits)

    assert real(thread.opened, 60)
    assert checkpoint(12.0) == [10.0]
    assert checkpoint(9.0) == [0.0]  # in between, it has caught up
    assert checkpoint(0.1) == [0.0]
    assert checkpoint(0.1) == [10.0]
    hub.close("finished")


def test_a_tracker_with_slow_writes_is_late_though_it_has_nothing_to_do_when_asked(
    tmp_path: Path, blocked: Blocked, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(hub_module.time, "monotonic", lambda: now)
    hub = TrackerHub({"slow": blocked}, lambda _: None)  # type: ignore[dict-item]
    hub.open(info(tmp_path), {})
    (thread,) = hub._threads
    hub.write(1, {"loss": 1.0})
    assert blocked.entered.wait(60)
    now += 1.0
    blocked.may_go_on.set()
    hub.flush()
    hub.state()
    assert thread._asked.wait(60)
    assert thread.is_late
    hub.write(2, {"loss": 1.0})
    hub.flush()
    assert thread._asked.wait(60)
    assert not thread.is_late
    hub.close("finished")


def test_what_a_tracker_had_not_taken_at_a_checkpoint_comes_again_after_a_crash(
    tmp_path: Path, blocked: Blocked
) -> None:
    hub = TrackerHub({"slow": blocked}, lambda _: None, patience=0.0)  # type: ignore[dict-item]
    hub.open(info(tmp_path), {})
    histogram = Histogram(torch.tensor([1.0, math.nan]), 0.0, 2.0)
    hub.write(3, {"loss": math.nan, SeriesName("loss", {"stage": "eval"}): 2.0})
    hub.write_texts(4, {"said": "four"})
    hub.write_histograms(4, {"sizes": histogram})
    hub.flush()
    saved = json.loads(json.dumps(hub.state(), allow_nan=False))
    assert saved["(behind)"]["slow"]["step"] == 0
    blocked.may_go_on.set()
    hub.close("failed")

    class Keeps(Blocked):
        def open(self, run: RunInfo, state: Any) -> Keeps:
            self.calls.append((run.resumed_step, state))
            return self

        def write(self, step: int, values: Mapping[str, Any]) -> None:
            self.calls.append((step, values))

        write_texts = write_histograms = write

    again = TrackerHub({"slow": (kept := Keeps()), "new": (other := Keeps())}, print, patience=60.0)  # type: ignore[dict-item]
    again.open(replace(info(tmp_path), resumed_step=4), saved)
    again.flush()
    again.write(5, {"loss": 1.0})
    again.flush()
    assert "(behind)" not in again.state()
    again.close("finished")
    (opened, (step, values), *texts, (_, sizes), flushed, last, _, _) = kept.calls
    assert (opened, step, texts, flushed) == ((0, None), 3, [(4, {"said": "four"})], "flush")
    assert math.isnan(values["loss"])
    assert [split_tags(name) for name in values] == [("loss", {}), ("loss", {"stage": "eval"})]
    assert sizes["sizes"].counts.nan_to_num(-1).tolist() == [1.0, -1.0]
    assert (last, other.calls[0]) == ((5, {"loss": 1.0}), (4, None))


def test_values_are_flushed_before_a_checkpoint_and_its_state_counts_them(tmp_path: Path, blocked: Blocked) -> None:
    hub = TrackerHub({"slow": blocked}, print, patience=60.0)  # type: ignore[dict-item]
    hub.open(info(tmp_path), {})
    hub.write(1, {"loss": 1.0})
    assert blocked.entered.wait(60)
    blocked.may_go_on.set()
    hub.flush()
    assert blocked.calls == [1, "flush"]
    assert hub.state() == {"slow": {"writes": 2}}
    hub.close("stopped")
    assert blocked.calls == [1, "flush", "stopped"]


def test_a_requested_state_is_of_the_moment_of_the_request_and_is_waited_for_later(
    tmp_path: Path, blocked: Blocked
) -> None:
    hub = TrackerHub({"slow": blocked}, print, patience=60.0)  # type: ignore[dict-item]
    hub.open(info(tmp_path), {})
    hub.write(1, {"loss": 1.0})
    answer = hub.request_state()  # its write has not come to an end
    hub.write(2, {"loss": 2.0})
    blocked.may_go_on.set()
    assert answer() == {"slow": {"writes": 2}}
    hub.flush()
    assert blocked.calls == [1, "flush", 2, "flush"]
    assert (hub.state(), answer()) == ({"slow": {"writes": 4}}, {"slow": {"writes": 2}})
    hub.close("finished")


def test_a_requested_state_that_does_not_come_is_the_last_known_with_what_was_behind_then(
    tmp_path: Path, blocked: Blocked
) -> None:
    hub = TrackerHub({"slow": blocked}, lambda _: None, patience=0.0)  # type: ignore[dict-item]
    hub.open(info(tmp_path), {"slow": {"writes": -1}})
    hub.write(1, {"loss": 1.0})
    answer = hub.request_state()
    hub.write(2, {"loss": 2.0})
    found = answer()
    assert found["slow"] == {"writes": -1}
    assert found["(behind)"] == {"slow": {"step": 0, "entries": [["write", 1, [["loss", {}, 1.0]]]]}}
    blocked.may_go_on.set()
    hub.close("finished")


def test_a_state_requested_while_the_answer_to_the_last_request_is_due_is_known_once_that_came(tmp_path: Path) -> None:
    may_open = threading.Event()

    class Opening(Blocked):
        def open(self, *_: Any) -> Blocked:
            assert may_open.wait(60)
            return self

    hub = TrackerHub({"slow": (tracker := Opening())}, print, patience=20.0)  # type: ignore[dict-item]
    tracker.may_go_on.set()
    hub.open(info(tmp_path), {})
    first = hub.request_state()
    hub.write(1, {"loss": 1.0})
    second = hub.request_state()  # of a save that waits for the first one
    may_open.set()
    assert first() == {"slow": {"writes": 1}}
    found = second()
    assert found["slow"] == {"writes": 1}, "without its state, the tracker's run could not be continued"
    assert found["(behind)"]["slow"]["entries"] == [["write", 1, [["loss", {}, 1.0]]]]
    hub.close("finished")


def test_a_requested_state_is_no_older_than_what_was_behind(
    tmp_path: Path, blocked: Blocked, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = TrackerHub({"slow": blocked}, print, patience=20.0)  # type: ignore[dict-item]
    hub.open(info(tmp_path), {"slow": {"writes": -1}})
    hub.write(1, {"loss": 1.0})
    first, state = hub.request_state(), Backlog.state

    def answered_before(backlog: Backlog) -> dict[str, Any]:
        blocked.may_go_on.set()
        first()
        return state(backlog)

    monkeypatch.setattr(Backlog, "state", answered_before)
    monkeypatch.setattr(hub, "_ask", lambda _: lambda: None)  # nothing comes of the second request
    assert hub.request_state()() == {"slow": {"writes": 2}}, "the write is neither in the state nor behind"
    monkeypatch.undo()
    hub.close("finished")


@pytest.mark.thorough
def test_training_goes_on_while_a_checkpoint_waits_for_a_tracker(job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    has_gone_on = threading.Event()

    def flush(_: ToyTracker) -> None:
        assert has_gone_on.wait(20)

    monkeypatch.setattr(ToyTracker, "flush", flush)
    saving = job(steps=3, trackers=["toy_tracker"], checkpoint={"every": 1, "asynchronous": True})
    notes: list[str] = []
    with saving.build(notes.append) as trainer:
        list(trainer.steps(1))
        store = trainer.checkpointer.store
        assert not store.steps()
        has_gone_on.set()
        trainer.checkpointer.wait()
        values = store.open("step-00000001").values()
    assert values["trackers"] == {"toy_tracker": {"id": "toy-1"}}
    assert not [note for note in notes if "tracker" in note]


def test_a_flush_that_is_not_through_yet_is_no_failure_and_is_repeated(tmp_path: Path, blocked: Blocked) -> None:
    blocked.may_go_on.set()
    answers = iter([False, None])
    blocked.flush = lambda: next(answers)  # type: ignore[assignment, return-value]
    said: list[str] = []
    hub = TrackerHub({"slow": blocked}, said.append, patience=60.0)  # type: ignore[dict-item]
    hub.open(info(tmp_path), {})
    hub.write(1, {"loss": 1.0})
    hub.flush()
    assert [step for _, step, _ in hub.state()["(behind)"]["slow"]["entries"]] == [1]  # type: ignore[call-overload, index, misc, union-attr]
    hub.write(2, {"loss": 2.0})
    hub.flush()
    assert "(behind)" not in hub.state()
    hub.close("finished")
    assert blocked.calls == [1, 2, "finished"]
    assert said == ["warning: tracker 'slow' has not written everything yet; training goes on"]


def test_entries_that_find_no_room_are_left_out_and_counted(
    tmp_path: Path, blocked: Blocked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_module, "ROOM", 3)
    said: list[str] = []
    hub = TrackerHub({"slow": blocked}, said.append, patience=20.0)  # type: ignore[dict-item]
    hub.open(info(tmp_path), {})
    hub.write(0, {"loss": 1.0})
    assert blocked.entered.wait(60)
    for step in range(1, 10):
        hub.write(step, {"loss": 1.0})
    blocked.may_go_on.set()
    hub.close("finished")
    assert blocked.calls == [0, 1, 2, 3, "finished"]
    assert len(said) == 2
    assert "is 3 entries behind; entries are dropped" in said[0]
    assert "too slow: 6 entries were dropped" in said[1]


def test_a_tracker_that_never_ends_is_left_behind(tmp_path: Path, blocked: Blocked) -> None:
    said: list[str] = []
    hub = TrackerHub({"slow": blocked}, said.append, patience=0.0)  # type: ignore[dict-item]
    hub.open(info(tmp_path), {})
    hub.write(1, {"loss": 1.0})
    assert blocked.entered.wait(60)
    hub.close("finished")
    assert "tracker 'slow' did not end within 0 s and was abandoned" in said[-1]


METHODS = ("open", "write", "flush", "state", "close")
RAISED = (SystemExit(0), KeyboardInterrupt(), GeneratorExit(), RecursionError("deep"))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("mode", "error"),
    [
        pytest.param(mode, error, marks=() if number % len(RAISED) == at % len(RAISED) else pytest.mark.full)
        for at, mode in enumerate(METHODS)
        for number, error in enumerate(RAISED)
    ],
)
def test_whatever_a_tracker_raises_switches_it_off(
    job: MakeJob, monkeypatch: pytest.MonkeyPatch, mode: str, error: BaseException
) -> None:
    def fail(*_: object) -> None:
        raise copy(error)  # raising adds to an exception's traceback

    monkeypatch.setattr(ToyTracker, mode, fail)
    trainer, notes = noted(job(trackers=["jsonl", "toy_tracker"]))
    assert trainer.train().status == "finished"
    assert [note for note in notes if "'toy_tracker'" in note] == [
        f"tracker 'toy_tracker' failed and is switched off: {error!r}"
    ]


def test_a_tracker_that_fails_where_nothing_can_be_said_holds_nobody_up(tmp_path: Path) -> None:
    class Fails(Blocked):
        def open(self, *_: object) -> Any:
            raise ValueError("no")

    def unheard(_text: str) -> None:
        raise OSError(28, "No space left on device")

    hub = TrackerHub({"bad": Fails()}, unheard, patience=3600.0)  # type: ignore[dict-item]
    hub.open(info(tmp_path), {})
    hub.flush()
    hub.close("finished")


class Choosy(Blocked):
    """Tracker that refuses some names."""

    def __init__(self, *refused: str) -> None:
        super().__init__()
        self.refused = set(refused)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if self.refused & values.keys():
            raise ValueError("no such name")
        self.calls.append((step, dict(values)))


def test_a_name_that_a_tracker_refuses_costs_that_name_alone(tmp_path: Path) -> None:
    tracker, notes = Choosy("b"), list[str]()
    hub = TrackerHub({"choosy": tracker}, notes.append)
    hub.open(info(tmp_path), {})
    for step in (1, 2):
        hub.write(step, {"a": 1.0, "b": 2.0, "c": 3.0})
    hub.close("finished")
    assert tracker.calls == [(1, {"a": 1.0}), (1, {"c": 3.0}), (2, {"a": 1.0, "c": 3.0}), "finished"]
    assert notes == [
        "warning: tracker 'choosy' refuses the number 'b', which is no longer sent: ValueError('no such name')"
    ]


def test_names_that_are_refused_alone_or_before_all_others_cost_no_tracker(tmp_path: Path) -> None:
    bad = [f"bad {number}" for number in range(4)]
    tracker, notes = Choosy(*bad), list[str]()
    hub = TrackerHub({"choosy": tracker}, notes.append)
    hub.open(info(tmp_path), {})
    hub.write(1, {"a": 1.0})
    hub.write(1, {bad[0]: 1.0})
    hub.write(2, {**dict.fromkeys(bad, 1.0), "a": 2.0, "b": 2.0})
    hub.close("finished")
    assert tracker.calls == [(1, {"a": 1.0}), (2, {"a": 2.0}), (2, {"b": 2.0}), "finished"]
    assert [note.split("'")[3] for note in notes] == bad


def test_a_name_that_is_refused_as_a_text_stays_as_a_number(tmp_path: Path) -> None:
    class NoTexts(Choosy):
        def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
            raise ValueError(f"{sorted(texts)} of step {step} are no texts")

    tracker, notes = NoTexts(), list[str]()
    hub = TrackerHub({"choosy": tracker}, notes.append)
    hub.open(info(tmp_path), {})
    for step in (1, 2):
        hub.write(step, {"a": 1.0})
        hub.write_texts(step, {"a": "said"})
    hub.close("finished")
    assert tracker.calls == [(1, {"a": 1.0}), (2, {"a": 1.0}), "finished"]
    assert len(notes) == 1
    assert "refuses the text 'a'" in notes[0]


def test_what_a_tracker_gets_again_after_a_resume_has_the_name_that_it_had(tmp_path: Path, blocked: Blocked) -> None:
    def opened(tracker: Any, states: Any, patience: float) -> TrackerHub:
        hub = TrackerHub({"slow": tracker}, lambda _: None, patience)
        hub.open(info(tmp_path), states)
        return hub

    hub = opened(blocked, {"slow": {}}, 0.0)
    hub.write(1, {"nul\0": 1.0, "%2E": 2.0})
    again = Choosy()
    hub = opened(again, hub.state(), 10.0)
    hub.write(2, {"nul\0": 1.0, "%2E": 2.0})
    hub.close("finished")
    assert [list(values) for _, values in again.calls[:2]] == [["nul%00", "%252E"]] * 2


def test_a_tracker_that_takes_nothing_more_is_switched_off(tmp_path: Path) -> None:
    tracker, notes = Choosy(), list[str]()
    hub = TrackerHub({"choosy": tracker}, notes.append)
    hub.open(info(tmp_path), {})
    hub.write(1, {"a": 1.0})
    hub.flush()
    tracker.refused = {"a", *map(str, range(20))}
    for number in range(20):
        hub.write(2, {str(number): 1.0})
    hub.write(2, {"a": 1.0})
    hub.close("finished")
    assert len(notes) == 10
    assert notes[-1] == "tracker 'choosy' failed and is switched off: ValueError('no such name')"


def test_texts_and_states_that_no_checkpoint_can_hold_do_not_reach_one(tmp_path: Path) -> None:
    class Says(Choosy):
        said: str

        def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
            self.calls.append((step, dict(texts)))

        def state(self) -> Any:
            return {"said": self.said}

    for said, off in (("whole", False), ("half \ud800", True)):
        tracker, notes = Says(), list[str]()
        tracker.said = said
        hub = TrackerHub({"says": tracker}, notes.append)
        hub.open(info(tmp_path), {})
        hub.write_texts(1, {"a": "half \ud800"})
        json.dumps(hub.state(), ensure_ascii=False).encode()
        hub.close("finished")
        assert tracker.calls[0] == (1, {"a": "half \\ud800"})
        assert [("switched off" in note) for note in notes] == [True] * off


def test_a_tracker_that_takes_no_value_is_switched_off_after_a_few(tmp_path: Path) -> None:
    names = [f"series {number}" for number in range(50)]
    tracker, notes = Choosy(*names), list[str]()
    hub = TrackerHub({"choosy": tracker}, notes.append)
    hub.open(info(tmp_path), {})
    hub.write(1, dict.fromkeys(names, 1.0))
    hub.close("finished")
    assert tracker.calls == []
    assert notes == ["tracker 'choosy' failed and is switched off: ValueError('no such name')"]


def test_odd_names_are_reported_a_few_times_and_all_are_logged(tmp_path: Path) -> None:
    tracker, notes = Choosy(), list[str]()
    hub = TrackerHub({"choosy": tracker}, notes.append)
    hub.open(info(tmp_path), {})
    hub.write(1, {f"tag {number}\n": 1.0 for number in range(30)})
    hub.write(2, {"tag 0\n": 1.0})
    hub.close("finished")
    assert [len(call[1]) for call in tracker.calls[:2]] == [30, 1]
    assert notes[0] == "note: the name 'tag 0\\n' cannot be stored and is logged as 'tag 0%0A'"
    assert len(notes) == 11


def test_a_tracker_that_failed_is_not_called_slow_too(
    tmp_path: Path, blocked: Blocked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_module, "ROOM", 3)
    said: list[str] = []
    hub = TrackerHub({"slow": blocked}, said.append, patience=20.0)  # type: ignore[dict-item]
    hub.open(info(tmp_path), {})
    (thread,) = hub._threads
    monkeypatch.setattr(blocked, "flush", lambda: 1 / 0)
    hub.write(0, {"loss": 1.0})
    assert blocked.entered.wait(60)
    thread.ask(lambda run: run.flush(), 1.0)
    for step in range(1, 10):
        hub.write(step, {"loss": 1.0})
    blocked.may_go_on.set()
    assert thread.ended.wait(60)
    hub.close("finished")
    assert [text.partition(":")[0] for text in said] == [
        "warning", "tracker 'slow' failed and is switched off",
    ]  # fmt: skip


def test_a_tracker_that_was_given_up_stays_late_until_it_has_written(tmp_path: Path, blocked: Blocked) -> None:
    hub = TrackerHub({"slow": blocked}, lambda _: None, patience=20.0)  # type: ignore[dict-item]
    blocked.may_go_on.set()
    hub.open(info(tmp_path), {})
    (thread,) = hub._threads
    thread.is_late = True
    late = []
    for step in (None, None, 1, None):
        if step is not None:
            hub.write(step, {"loss": 1.0})
        assert thread.ask(lambda run: run.flush(), 60.0).wait(60)
        late.append(thread.is_late)
    assert late == [True, True, False, False]
    hub.close("finished")


def test_a_flush_covers_the_last_step_so_far_even_if_an_earlier_one_came_later() -> None:
    backlog = Backlog(2, 10)
    backlog.add("write", 5, {"a": 1.0})
    backlog.add("write_files", 7, {"f": "x"})
    backlog.add("write", 3, {"a": math.inf})
    flushed = backlog.mark()
    backlog.add("write", 8, {"a": 2.0})
    assert backlog.state() == {
        "step": 2,
        "entries": [
            ["write", 5, [["a", {}, 1.0]]], ["write", 3, [["a", {}, "inf"]]], ["write", 8, [["a", {}, 2.0]]],
        ],
    }  # fmt: skip
    flushed()
    assert backlog.state() == {"step": 7, "entries": [["write", 8, [["a", {}, 2.0]]]]}


def test_the_thread_of_a_tracker_does_not_keep_the_process_alive(tmp_path: Path, blocked: Blocked) -> None:
    hub = TrackerHub({"slow": blocked}, lambda _: None, patience=20.0)  # type: ignore[dict-item]
    hub.open(info(tmp_path), {})
    assert {thread.daemon for thread in threading.enumerate() if thread.name == "d9d-tracker-slow"} == {True}
    hub.close("finished")
