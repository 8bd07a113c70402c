"""The schedule suite accepts a sound schedule and names the fault of a faulty one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from d9d_testing.suites.schedule import ScheduleSuite

PLUGIN = str(Path(__file__).parent / "faults" / "implementations" / "broken_schedules.py")


class ByHand(ScheduleSuite):
    plugin = PLUGIN
    target = "by_hand"

    def most_held(self, ranks: int, microbatches: int, settings: Mapping[str, Any]) -> float:
        return microbatches


def suite(fault: str, **values: Any) -> ScheduleSuite:
    ranks = (2, 3) if fault in ("an idle rank", "one program too few") else (1, 2, 3)
    made: ScheduleSuite = type("Suite", (ByHand,), {"settings": ({"fault": fault},), "ranks": ranks, **values})()
    return made


TESTS = [name for name in dir(ScheduleSuite) if name.startswith("test_")]
#: Needs the simulator, which is another package, or cannot be asked of a single file.
ELSEWHERE = {"test_ranks_compute_at_the_same_time", "test_it_is_made_without_torch"}


@pytest.mark.parametrize("name", [name for name in TESTS if name not in ELSEWHERE])
def test_a_sound_schedule_passes(name: str) -> None:
    getattr(suite("none"), name)()


COMPUTES = "test_every_stage_computes_each_microbatch_once_and_in_order"
WAITS = "test_nobody_waits_forever"
FAULTS = [
    (
        "forgets a backward",
        COMPUTES,
        "1 ranks, 1 microbatches, {'fault': 'forgets a backward'}: B0.0 missing on rank 0",
    ),
    (
        "one program too few",
        COMPUTES,
        "2 ranks, 1 microbatches, {'fault': 'one program too few'}: 1 programs; return one",
    ),
    ("an idle rank", COMPUTES, "ranks [1] have no stage"),
    ("sends far ahead", WAITS, "rank 0 at S>0.3 waits for R>1.2 on rank 1; rank 1 at S<1.1 waits for R<0.0 on rank 0"),
    (
        "changes",
        "test_the_same_numbers_give_the_same_programs",
        "1 ranks, 2 microbatches, {'fault': 'changes'}: rank 0",
    ),
    ("takes anything", "test_too_few_microbatches_are_refused", "DID NOT RAISE"),
    ("prints nothing", "test_programs_survive_being_printed", "'?' is not an action"),
]


@pytest.mark.parametrize(("fault", "name", "text"), FAULTS, ids=[fault for fault, *_ in FAULTS])
def test_a_fault_is_found_and_named(fault: str, name: str, text: str) -> None:
    with pytest.raises((AssertionError, ValueError, pytest.fail.Exception), match=re.escape(text)):
        getattr(suite(fault), name)()


def test_a_schedule_that_runs_one_rank_after_the_other_is_no_pipeline() -> None:
    pytest.importorskip("d9d_pipeline.simulator.run")
    suite("none").test_ranks_compute_at_the_same_time()
    with pytest.raises(AssertionError, match="2 ranks, 2 microbatches.*no two ranks ever compute at the same time"):
        suite("one at a time").test_ranks_compute_at_the_same_time()


@pytest.mark.parametrize(
    ("promised", "text"),
    [(1, "1 ranks, 2 microbatches.*a rank holds 2 microbatches, but most_held says 1"), (99, "lower it")],
)
def test_a_promise_that_is_broken_or_idle_is_named(promised: float, text: str) -> None:
    with pytest.raises(AssertionError, match=text):
        suite("none", most_held=lambda *_: promised).test_no_rank_holds_more_than_promised()


def test_the_rank_that_holds_most_counts() -> None:
    greedy = suite("sends far ahead", ranks=(2,), most_held=lambda *_: 1)  # the first rank holds all microbatches
    with pytest.raises(
        AssertionError, match="2 ranks, 2 microbatches.*a rank holds 2 microbatches, but most_held says 1"
    ):
        greedy.test_no_rank_holds_more_than_promised()


def test_a_schedule_must_say_what_it_holds() -> None:
    with pytest.raises(NotImplementedError, match="return the schedule's largest memory use"):
        suite("none", most_held=ScheduleSuite.most_held).test_no_rank_holds_more_than_promised()


def test_a_schedule_of_a_module_is_made_without_torch() -> None:
    values = {"plugin": "d9d_testing.toy.plugin", "target": "toy_schedule"}
    with pytest.raises(AssertionError, match="toy_schedule: d9d_testing.toy.modifiers:ToySchedule imports torch"):
        suite("none", **values).test_it_is_made_without_torch()
