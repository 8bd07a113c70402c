"""Trackers that fail, exit or wait: none of them ends or delays the training."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from pathlib import Path
from typing import Any

import pytest
from d9d_core.protocols.tracker import RunInfo
from d9d_engine.job import Job
from d9d_engine.trackers import hub as hub_module
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
    assert "is 3 entries behind; entries are left out" in said[0]
    assert "too slow: 6 entries are left out" in said[1]


def test_a_tracker_that_never_ends_is_left_behind(tmp_path: Path, blocked: Blocked) -> None:
    said: list[str] = []
    hub = TrackerHub({"slow": blocked}, said.append, patience=0.0)  # type: ignore[dict-item]
    hub.open(info(tmp_path), {})
    hub.write(1, {"loss": 1.0})
    assert blocked.entered.wait(60)
    hub.close("finished")
    assert "tracker 'slow' has not ended after 0 s and is left behind" in said[-1]


@pytest.mark.parametrize("error", [SystemExit(0), KeyboardInterrupt(), GeneratorExit(), RecursionError("deep")])
@pytest.mark.parametrize("mode", ["open", "write", "flush", "state", "close"])
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
