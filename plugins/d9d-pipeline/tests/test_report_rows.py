"""Rows of the comparison of schedules: their order, notes and numbers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from d9d_pipeline.cli.report import Row, print_comparison, print_simulation


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


def test_a_comparison_numbers_the_rows_that_nothing_speaks_against(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        Row("fast", simulation(2.0, 1.0, 3.0), limit=4.0, stages=2),
        Row("slow", simulation(3.0, 1.0, 4.0), limit=4.0, stages=1),
        Row("wide", simulation(1.5, 5.0), limit=4.0, stages=3),
        Row("none", None, problem="too few"),
    ]
    print_comparison(rows, "8 microbatches", 4.0)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        ["8", "microbatches,", "at", "most", "4", "held"],
        ["schedule", "stages", "time", "bubble", "inner", "holds", "sends", "note"],
        ["1", "fast", "2", "2", "25.0%", "12.5%", "3", "7"],
        ["2", "slow", "1", "3", "25.0%", "12.5%", "4", "7"],
        ["wide", "3", "1.5", "25.0%", "12.5%", "5", "7", "over", "the", "memory", "limit"],
        ["none", "-", "-", "-", "-", "-", "-", "too", "few"],
    ]
    print_comparison(rows[:1], "8 microbatches", None)
    assert capsys.readouterr().out.splitlines()[0].strip() == "8 microbatches"


@pytest.mark.parametrize(("length", "shown"), [(12, " ".join(f"F{n}" for n in range(12))), (13, "F11 ... F12")])
def test_a_long_critical_path_is_shown_by_its_first_actions_and_its_last(
    length: int, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    step = simulation(2.0, 1.0, 3.0)
    step.critical_path, step.inbox = [f"F{number}" for number in range(length)], [1, 4]
    print_simulation(step, "a title")
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[:2] == ["a title", "rank stages computes idle holds offers sends"]
    facts = lines[2 + step.ranks :]  # without a header
    assert facts[:5] == [
        "time 2",
        "bubble 25.00%; 12.50% inside the work of the idlest rank",
        "holds at most 3 microbatches through all stages of a rank",
        "offers memory for at most 4 tensors before they are used",
        "sends 7 tensors between ranks",
    ]
    assert facts[5].startswith(f"critical {length} actions: F0 F1 ")
    assert facts[5].endswith(shown)
