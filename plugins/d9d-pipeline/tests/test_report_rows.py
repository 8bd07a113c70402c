"""Rows of the comparison of schedules: their order, notes and numbers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from d9d_pipeline.cli.report import Row, print_simulation


def simulation(makespan: float, *peak: float, ranks: int = 2) -> Any:
    return SimpleNamespace(
        makespan=makespan, peak_live=peak, bubble=0.25, inner_bubble=0.125, inbox=(1,) * ranks, sent=[2] * ranks,
        critical_path=["F0"], ranks=ranks, volume=7,
        busy=[0.75 * makespan] * ranks, stages=lambda rank: (rank, rank + ranks),
    )  # fmt: skip


def test_schedules_within_the_limit_come_first_then_fast_then_small_ones() -> None:
    rows = [
        Row("none", None, problem="needs more ranks"),
        Row("too large", simulation(1.0, 1.0, 5.0), limit=4.0),
        Row("slow", simulation(3.0, 1.0, 1.0), limit=4.0),
        Row("wide", simulation(2.0, 1.0, 4.0), limit=4.0),
        Row("narrow", simulation(2.0 + 1e-12, 3.0, 2.0), limit=4.0),
        Row("b", simulation(2.0, 2.0, 3.0), limit=4.0),
    ]
    assert [row.name for row in sorted(rows, key=Row.order)] == ["b", "narrow", "wide", "slow", "too large", "none"]
    assert [row.note for row in rows[:3]] == ["needs more ranks", "over the memory limit", ""]
    assert [row.too_large for row in rows] == [False, True, False, False, False, False]
    assert not Row("any", simulation(1.0, 9.0)).too_large


def test_numbers_of_a_row_are_those_of_its_step() -> None:
    assert Row("none", None, problem="why").facts() == {"schedule": "none", "stages_per_rank": 0, "note": "why"}
    assert Row("one", simulation(2.0, 1.0, 3.0), stages=2).facts() == {
        "schedule": "one", "stages_per_rank": 2, "note": "", "time": 2.0, "bubble": 0.25, "inner_bubble": 0.125,
        "peak_live": [1.0, 3.0], "inbox": [1, 1], "sent": [2, 2], "critical_path": ["F0"],
    }  # fmt: skip


@pytest.mark.parametrize(("ranks", "shown"), [(16, [*range(16)]), (17, [*range(8), "...", *range(9, 17)])])
def test_a_long_pipeline_shows_both_ends(ranks: int, shown: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    print_simulation(simulation(2.0, *range(ranks), ranks=ranks), "a title")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].strip() == "a title"
    rows = [line.split() for line in lines[2 : 2 + len(shown)]]
    assert [row[0] for row in rows] == [str(rank) for rank in shown]
    last = ranks - 1
    assert rows[-1] == [str(last), f"{last},", str(last + ranks), "1.5", "25.0%", str(last), "1", "2"]
