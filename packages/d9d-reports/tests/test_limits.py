"""Limits of reports and sweeps that their manual states."""

from __future__ import annotations

from d9d_core.schedule import Backward, Forward, InputBackward, WeightBackward
from d9d_reports.report import series, tables, timeline
from d9d_reports.runs import grid


def test_reports_and_sweeps_have_the_documented_limits() -> None:
    assert (series._ALL_POINTS, series._MOST, series._CURVES, series._ALL_CURVES) == (60_000, 1500, 16, 400)
    assert (tables._CELLS, timeline._MOST) == (60_000, 6000)
    assert (grid._MOST, grid._SHOWN) == (10_000, 10)


def test_actions_of_a_timeline_have_their_usual_shares_of_a_step() -> None:
    found = next(value for value in vars(timeline).values() if isinstance(value, dict) and Forward in value)
    assert {kind: found[kind][:2] for kind in (Forward, Backward, InputBackward, WeightBackward)} == {
        Forward: ("forward", 1),
        Backward: ("backward", 2),
        InputBackward: ("gradients of inputs", 1),
        WeightBackward: ("gradients of weights", 1),
    }
