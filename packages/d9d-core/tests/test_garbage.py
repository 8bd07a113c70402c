"""Garbage is collected seldom while a command starts, and as before afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from d9d_core.cli.garbage import collected_seldom
from d9d_core.cli.interrupts import interrupts_deferred


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_the_thresholds_come_back_even_after_an_error() -> None:
    gc.set_threshold(700, 9, 8)

    def fail() -> None:
        with collected_seldom():
            assert gc.get_threshold() == (100_000, 9, 8)
            raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        fail()
    assert gc.get_threshold() == (700, 9, 8)


@pytest.mark.parametrize("chosen", [0, 1_000_000])
def test_whoever_wants_it_more_seldom_gets_that(chosen: int) -> None:
    gc.set_threshold(chosen, 10, 10)
    with collected_seldom():
        assert gc.get_threshold()[0] == chosen
    assert gc.get_threshold()[0] == chosen


def test_heavy_imports_are_not_searched_for_garbage() -> None:
    before = gc.get_threshold()
    with interrupts_deferred():
        assert gc.get_threshold()[0] > before[0]
    assert gc.get_threshold() == before
