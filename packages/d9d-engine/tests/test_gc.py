"""The garbage collector during training."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
from d9d_engine.run.gc import built_objects_spared


class Node:
    other: Any = None


def cycle() -> weakref.ref[Node]:
    first, second = Node(), Node()
    first.other, second.other = second, first
    return weakref.ref(first)


@pytest.fixture(autouse=True)
def nothing_frozen() -> None:
    gc.unfreeze()  # what pytest's own setup has


def test_what_exists_is_spared_and_what_comes_later_is_collected() -> None:
    kept = [Node() for _ in range(1000)]
    with built_objects_spared():
        tracked = {id(item) for item in gc.get_objects()}
        assert not tracked & {id(node) for node in kept}
        later = cycle()
        gc.collect()
        assert later() is None
    assert {id(node) for node in kept} <= {id(item) for item in gc.get_objects()}


def test_what_a_caller_froze_stays_frozen() -> None:
    gc.freeze()
    with built_objects_spared():
        pass
    assert gc.get_freeze_count() > 0
