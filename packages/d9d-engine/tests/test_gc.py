"""The garbage collector during training."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from d9d_core import events as ev
from d9d_core.subscriber import Subscribes, subscribe
from d9d_engine.job import Job
from d9d_engine.run.gc import PacedCollection, built_objects_spared
from d9d_testing.toy.runs import quiet

MakeJob = Callable[..., Job]


class Node:
    other: Any = None


def cycle() -> weakref.ref[Node]:
    first, second = Node(), Node()
    first.other, second.other = second, first
    return weakref.ref(first)


@pytest.fixture
def nothing_frozen() -> None:
    """Unfreeze what pytest's own setup has; a collection takes half a second then."""
    gc.unfreeze()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # of what other tests left in this process
        gc.collect()


@pytest.mark.full
@pytest.mark.usefixtures("nothing_frozen")
def test_what_exists_is_spared_and_what_comes_later_is_collected() -> None:
    kept = [Node() for _ in range(1000)]
    with built_objects_spared():
        tracked = {id(item) for item in gc.get_objects()}
        assert not tracked & {id(node) for node in kept}
        later = cycle()
        gc.collect()
        assert later() is None
    assert {id(node) for node in kept} <= {id(item) for item in gc.get_objects()}


@pytest.mark.thorough
@pytest.mark.usefixtures("nothing_frozen")
def test_what_a_caller_froze_stays_frozen() -> None:
    gc.freeze()
    with built_objects_spared():
        pass
    assert gc.get_freeze_count() > 0


@pytest.fixture
def collections(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Generations that were collected by a call."""
    seen: list[int] = []

    def collect(generation: int = 2) -> int:
        seen.append(generation)
        return 0

    monkeypatch.setattr(gc, "collect", collect)
    return seen


class Watcher(Subscribes):
    """Subscriber that notes whether Python collects by itself, and fails at a step."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.automatic: list[bool] = []

    @subscribe(ev.StepEnds)
    def on_step(self, event: ev.StepEnds) -> None:
        self.automatic.append(gc.isenabled())
        if self.fails and event.step == 3:
            raise RuntimeError("broken")


@pytest.mark.thorough
@pytest.mark.usefixtures("nothing_frozen")
def test_young_objects_are_collected_at_steps_and_all_objects_with_each_checkpoint(
    job: MakeJob, collections: list[int]
) -> None:
    trainer = quiet(job("garbage_collection.every=3", "checkpoint.every=6"))
    collections.clear()
    trainer.train()
    # The first collection covers the objects that exist at the start. A checkpoint comes before the young
    # ones of its step.
    assert collections == [2, 1, 2, 1, 1, 1, 2]


@pytest.mark.thorough
@pytest.mark.parametrize(("every", "automatic"), [("5", False), ("null", True)])
def test_python_collects_by_itself_again_after_a_run(job: MakeJob, every: str, automatic: bool) -> None:
    watcher = Watcher()
    job(f"garbage_collection.every={every}").build(lambda _: None, observers=[watcher]).train()
    assert watcher.automatic == [automatic] * 12
    assert gc.isenabled()


def test_python_collects_by_itself_again_after_a_run_that_failed(job: MakeJob) -> None:
    watcher = Watcher(fails=True)
    with pytest.raises(RuntimeError, match="broken"):
        job().build(lambda _: None, observers=[watcher]).train()
    assert not any(watcher.automatic)
    assert gc.isenabled()


def test_collection_that_was_off_before_stays_off() -> None:
    gc.disable()
    try:
        with PacedCollection(10).paced():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
