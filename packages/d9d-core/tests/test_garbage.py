"""Garbage is collected seldom while a command starts, and as before afterwards."""

from __future__ import annotations

import gc
import subprocess
import sys
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


def test_a_command_ends_without_a_search_for_garbage() -> None:
    code = """
import atexit, gc, sys
from d9d_core.cli.main import main

gc.set_threshold(700, 10, 10)
atexit.register(lambda: print("frozen", gc.get_freeze_count() > 0))  # called after what is registered later
sys.argv = ["d9d", "--version"]
try:
    main()
finally:
    print("before", gc.get_freeze_count(), *gc.get_threshold())
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[1:] == ["before 0 700 10 10", "frozen True"]
