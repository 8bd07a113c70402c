"""Seconds between two log entries, without pauses."""

from __future__ import annotations

import pytest
from d9d_engine.run import clock as module
from d9d_engine.run.clock import Clock


class Time:
    """A clock that is set by hand."""

    now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    made = Time()
    monkeypatch.setattr(module, "time", made)
    return made


def test_seconds_are_those_since_the_last_entry(time: Time) -> None:
    clock = Clock()
    time.now += 3
    assert clock.take() == 3
    time.now += 4
    assert clock.take() == 4
    assert clock.take() == 0


def test_pauses_and_stops_do_not_count(time: Time) -> None:
    clock = Clock()
    time.now += 1
    with clock.paused():
        time.now += 10
    time.now += 2
    clock.stop()
    time.now += 20
    clock.stop()
    time.now += 30
    clock.go()
    time.now += 4
    clock.go()
    time.now += 8
    assert clock.take() == 1 + 2 + 4 + 8

    def fails() -> None:
        time.now += 7
        raise KeyError

    with pytest.raises(KeyError), clock.paused():
        fails()
    time.now += 1
    assert clock.take() == 1
