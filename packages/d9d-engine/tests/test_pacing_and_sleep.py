"""Order of garbage collections, and a trainer's sleep and wake. Collaborators are stand-ins."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from dataclasses import astuple
from types import SimpleNamespace
from typing import Any

import pytest
from d9d_engine.run.gc import PacedCollection, built_objects_spared
from d9d_engine.run.trainer import Trainer


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Calls of Python's collector, in order."""
    did: list[Any] = []
    monkeypatch.setattr(gc, "collect", lambda generation=2: did.append(("collect", generation)))
    for name in ("freeze", "unfreeze", "disable", "enable"):
        monkeypatch.setattr(gc, name, lambda name=name: did.append(name))
    return did


@pytest.mark.parametrize(("before", "after"), [(0, ["unfreeze"]), (1, [])])
def test_garbage_is_collected_before_what_exists_is_spared(
    monkeypatch: pytest.MonkeyPatch, collector: list[Any], before: int, after: list[str]
) -> None:
    monkeypatch.setattr(gc, "get_freeze_count", lambda: before)
    with built_objects_spared():
        assert collector == [("collect", 2), "freeze"]
    assert collector[2:] == after


@pytest.mark.parametrize(
    ("every", "enabled", "calls"), [(3, True, ["disable", "enable"]), (3, False, ["disable"]), (None, True, ["enable"])]
)
def test_python_collects_by_itself_again_after_a_paced_block(
    monkeypatch: pytest.MonkeyPatch, collector: list[Any], every: int | None, enabled: bool, calls: list[str]
) -> None:
    monkeypatch.setattr(gc, "isenabled", lambda: enabled)
    with PacedCollection(every).paced():
        pass
    assert collector == calls


def test_young_objects_are_collected_at_multiples_and_all_after_a_pause(collector: list[Any]) -> None:
    paced, python = PacedCollection(3), PacedCollection(None)
    for step in range(1, 8):
        paced.after_step(step)
        python.after_step(step)
        if step == 3:
            assert collector == [("collect", 1)]
    assert collector == [("collect", 1)] * 2
    python.after_pause()
    assert len(collector) == 2
    paced.after_pause()
    assert collector[2:] == [("collect", 2)]


class Sleeper:
    """Sleeper of two tags; each takes 5 bytes."""

    def __init__(self) -> None:
        self.asleep: set[str] = set()

    def settle(self, tags: tuple[str, ...]) -> list[str]:
        return list(tags) or ["weights", "optimizer"]

    def sleep(self, tags: tuple[str, ...]) -> int:
        self.asleep |= set(tags)
        return 5 * len(tags)

    def wake(self, tags: tuple[str, ...]) -> int:
        self.asleep -= set(tags)
        return 5 * len(tags)


def test_a_trainer_sleeps_and_wakes_each_part_once() -> None:
    did: list[Any] = []
    trainer: Any = Trainer.__new__(Trainer)

    @contextmanager
    def called(run: Any) -> Any:
        did.append("called")
        yield

    run = SimpleNamespace(settle_writes=lambda: did.append("settled"))
    prefetcher = SimpleNamespace(state=lambda: "state", load_state=lambda state: did.append(("data", state)))
    names = {
        "_parts": SimpleNamespace(sleeper=Sleeper(), prefetcher=prefetcher),
        "_life": SimpleNamespace(called=called, progress=SimpleNamespace(step=7)),
        "_between_steps": lambda call, awake: did.append((call, awake)) or run,
    }
    for name, value in names.items():
        object.__setattr__(trainer, name, value)
    emit = lambda event: did.append((type(event).__name__, *astuple(event)))  # noqa: E731
    given = {
        "progress": SimpleNamespace(step=7), "events": SimpleNamespace(emit=emit), "prefetcher": prefetcher,
    }  # fmt: skip
    properties = {name: property(lambda _self, value=value: value) for name, value in given.items()}
    trainer.__class__ = type("Of", (Trainer,), properties)
    assert trainer.wake() == 0
    assert trainer.sleep("weights") == 5
    assert did == [
        ("sleep", False), "called", "settled", ("SleepStarts", 7, ("weights",)), ("data", "state"),
        ("SleepEnds", 7, ("weights",), 5),
    ]  # fmt: skip
    did.clear()
    assert trainer.sleep("weights") == 0
    assert did == []
    assert trainer.sleep() == 5
    assert did[-1] == ("SleepEnds", 7, ("optimizer",), 5)
    did.clear()
    assert trainer.wake() == 10
    assert did == [
        ("WakeStarts", 7, ("weights", "optimizer")), ("WakeEnds", 7, ("weights", "optimizer"), 10),
    ]  # fmt: skip
    assert trainer.wake("weights") == 0
