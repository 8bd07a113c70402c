"""Faults of programs are found before they run, and reported with rank and action."""

from __future__ import annotations

import pytest
from d9d_core.errors import BuildError
from d9d_core.program.placement import checked_programs
from d9d_core.program.text import parse_programs
from d9d_core.program.validation import placement, validate
from d9d_core.schedule import Action, Program
from hypothesis import given
from hypothesis import strategies as st

#: Two stages on two ranks, one microbatch.
TWO = "F0.0 S>0.0 R<0.0 B0.0 R0\nR>1.0 F1.0 B1.0 S<1.0 R1"
#: The same with the backwards of the second stage apart.
SPLIT = "F0.0 S>0.0 R<0.0 B0.0 R0\nR>1.0 F1.0 I1.0 S<1.0 W1.0 R1"
#: Three stages on two ranks, the last two on one of them.
SHARED = "F0.0 S>0.0 R<0.0 B0.0 R0\nR>1.0 F1.0 F2.0 B2.0 R2 B1.0 S<1.0 R1"
#: Two microbatches with an overlapped pair on the first rank of a V.
PAIR = (
    "F0.0 S>0.0 R>3.0 F3.0 F0.1 S>0.1 B3.0 S<3.0 R>3.1 F3.1 R<0.0 B3.1 S<3.1 B0.0 R<0.1 B0.1 R3 R0\n"
    "R>1.0 F1.0 F2.0 S>2.0 R>1.1 F1.1 F2.1 S>2.1 R<2.0 B2.0 B1.0 S<1.0 R<2.1 B2.1 R2 B1.1 S<1.1 R1"
)


def check(text: str, stages: int = 2, microbatches: int = 1, **options: bool | int | None) -> list[str]:
    return validate(parse_programs(text), stages, microbatches, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("text", "stages", "microbatches"), [(TWO, 2, 1), (SPLIT, 2, 1), (SHARED, 3, 1), (PAIR, 4, 2)])
def test_sound_programs_have_no_problems(text: str, stages: int, microbatches: int) -> None:
    assert check(text, stages, microbatches) == []
    assert check(text, stages, microbatches, buffers=None) == []


def test_an_overlapped_pair_counts_as_both() -> None:
    paired = PAIR.replace("F3.1 R<0.0 B3.1 S<3.1 B0.0", "R<0.0 F3.1+B0.0 B3.1 S<3.1")
    assert check(paired, 4, 2) == []


@given(st.data())
def test_leaving_out_any_action_is_noticed(data: st.DataObject) -> None:
    text, stages, microbatches = data.draw(st.sampled_from([(TWO, 2, 1), (SPLIT, 2, 1), (SHARED, 3, 1), (PAIR, 4, 2)]))
    programs = [list(program) for program in parse_programs(text)]
    rank = data.draw(st.integers(0, len(programs) - 1))
    left_out = programs[rank].pop(data.draw(st.integers(0, len(programs[rank]) - 1)))
    problems = validate([tuple(program) for program in programs], stages, microbatches)
    assert str(left_out) in problems[0]


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("B0.0", "", "B0.0 missing on rank 0: a stage computes each microbatch once"),
        (" R1", "", "R1 is missing on rank 1: add it after the last gradients of stage 1"),
        ("S>0.0", "", "S>0.0 is missing on rank 0: stage 1 is on rank 1, so rank 0 sends it"),
        ("R>1.0", "", "R>1.0 is missing on rank 1: stage 0 is on rank 0, so rank 1 receives it"),
        ("S<1.0", "", "S<1.0 is missing on rank 1: stage 0 is on rank 0, so rank 1 sends it"),
        ("R<0.0", "", "R<0.0 is missing on rank 0: stage 1 is on rank 1, so rank 0 receives it"),
        ("B1.0 S<1.0", "B1.0 S<1.0 S>1.0", "S>1.0 on rank 1: there is no stage 2; remove it"),
        ("F0.0 S>0.0", "S>0.0 F0.0", "S>0.0 comes before F0.0 on rank 0, but depends on it; move it after F0.0"),
        ("R>1.0 F1.0", "F1.0 R>1.0", "F1.0 comes before R>1.0 on rank 1, but depends on it; move it after R>1.0"),
        ("R<0.0 B0.0", "B0.0 R<0.0", "B0.0 comes before R<0.0 on rank 0, but depends on it; move it after R<0.0"),
        ("F1.0 B1.0", "B1.0 F1.0", "B1.0 comes before F1.0 on rank 1, but depends on it; move it after F1.0"),
        ("B1.0 S<1.0", "S<1.0 B1.0", "S<1.0 comes before B1.0 on rank 1, but depends on it; move it after B1.0"),
        ("B0.0 R0", "R0 B0.0", "R0 comes before B0.0 on rank 0, but depends on it; move it after B0.0"),
        ("F1.0 B1.0", "F1.0+B1.0", "F1.0+B1.0 on rank 1 overlaps two computations of which one needs the other"),
        ("B1.0", "B1.0 I1.0", "B1.0 on rank 1 computes all gradients, but I1.0 or W1.0 is there too; remove one"),
        ("B1.0", "I1.0", "W1.0 missing on rank 1: a stage computes each microbatch once"),
        ("B1.0", "W1.0", "I1.0 missing on rank 1: a stage computes each microbatch once"),
        ("F0.0", "F0.0 F0.0", "F0.0 appears twice, on rank 0 and rank 0; remove one"),
        ("R1", "R1 R1", "R1 appears twice, on rank 1 and rank 1; remove one"),
        ("R1", "R1 F0.0", "F0.0 appears twice, on rank 0 and rank 1; remove one"),
        ("R1", "R1 W0.0", "F0.0 is on rank 0 but W0.0 on rank 1: keep all actions of a stage on one rank"),
    ],
)
def test_a_mistake_is_named_with_its_rank(old: str, new: str, problem: str) -> None:
    assert old in TWO
    assert any(found.startswith(problem) for found in check(TWO.replace(old, new, 1))), check(TWO.replace(old, new, 1))


def test_gradients_of_weights_come_after_those_of_inputs_and_before_the_reduction() -> None:
    early = check(SPLIT.replace("I1.0 S<1.0 W1.0", "W1.0 I1.0 S<1.0"))
    assert early == ["W1.0 comes before I1.0 on rank 1, but depends on it; move it after I1.0"]
    late = check(SPLIT.replace("W1.0 R1", "R1 W1.0"))
    assert late == ["R1 comes before W1.0 on rank 1, but depends on it; move it after W1.0"]


def test_neighbouring_stages_of_a_rank_send_nothing_but_keep_their_order() -> None:
    assert check(SHARED.replace("F1.0 F2.0", "F2.0 F1.0"), 3) == [
        "F2.0 comes before F1.0 on rank 1, but depends on it; move it after F1.0"
    ]
    assert check(SHARED.replace("B2.0 R2 B1.0", "B1.0 B2.0 R2"), 3) == [
        "B1.0 comes before B2.0 on rank 1, but depends on it; move it after B2.0"
    ]
    assert check(SHARED.replace("F1.0 F2.0", "F1.0 S>1.0 F2.0"), 3) == [
        "S>1.0 on rank 1: stage 2 is on the same rank; remove it"
    ]


def test_both_sides_of_a_channel_keep_one_order() -> None:
    crossed = (
        "F0.0 S>0.0 F0.1 S>0.1 R<0.0 B0.0 R<0.1 B0.1 R0\n"
        "R>1.1 R>1.0 F1.0 F1.1 B1.0 S<1.0 B1.1 S<1.1 R1"
    )  # fmt: skip
    assert check(crossed, 2, 2) == [
        "rank 0 sends S>0.0 before S>0.1, but rank 1 receives R>1.1 before R>1.0; "
        "tensors from one rank to another arrive in the order of sending: swap the receives"
    ]


def test_ranks_that_wait_for_one_another_are_named() -> None:
    # Each rank wants the other's microbatch first.
    cycle = (
        "F0.0 R<0.1 S>0.0 F0.1 B0.1 S>0.1 R<0.0 B0.0 R0\n"
        "R>1.0 F1.0 R>1.1 F1.1 B1.1 S<1.1 B1.0 S<1.0 R1"
    )  # fmt: skip
    (problem,) = check(cycle, 2, 2)
    assert problem == (
        "deadlock with room for 1 tensor(s) from one rank to another: rank 0 at B0.1 waits for S<1.1 on rank 1; "
        "rank 1 at F1.1 waits for S>0.1 on rank 0: move one of these actions before the action at which its rank waits"
    )


def test_of_two_deadlocks_the_one_on_the_first_ranks_is_named() -> None:
    # Ranks 0 and 1 wait for one another with their second microbatch, and so do ranks 2 and 3.
    cycles = (
        "F0.0 S>0.0 R<0.0 B0.0 F0.1 S>0.1 R<0.1 B0.1 R0\n"
        "R>1.0 F1.0 S>1.0 R>1.1 F1.1 S>1.1 R<1.0 B1.0 S<1.0 R<1.1 B1.1 S<1.1 R1\n"
        "R>2.0 F2.0 S>2.0 R<2.0 B2.0 S<2.0 R>2.1 F2.1 S>2.1 R<2.1 B2.1 S<2.1 R2\n"
        "R>3.0 F3.0 R>3.1 F3.1 B3.0 S<3.0 B3.1 S<3.1 R3"
    )  # fmt: skip
    (problem,) = check(cycles, 4, 2)
    assert "rank 0 at B0.0 waits for S<1.0 on rank 1; rank 1 at F1.1 waits for S>0.1 on rank 0: move" in problem


def test_sending_far_ahead_needs_room() -> None:
    # Rank 0 sends all microbatches of its first stage before it takes any for its second one.
    first = " ".join(f"F0.{m} S>0.{m}" for m in range(4)) + " " + " ".join(f"R>2.{m} F2.{m} S>2.{m}" for m in range(4))
    second = " ".join(f"R>1.{m} F1.{m} S>1.{m}" for m in range(4)) + " " + " ".join(f"R>3.{m} F3.{m}" for m in range(4))
    text = f"{first}\n{second}"
    assert check(text, 4, 4, training=False, buffers=None) == []
    assert check(text, 4, 4, training=False, buffers=2) == []
    (problem,) = check(text, 4, 4, training=False, buffers=1)
    assert "rank 0 at S>0.3 waits for R>1.2 on rank 1; rank 1 at S>1.1 waits for R>2.0 on rank 0" in problem


def test_inference_has_forwards_only() -> None:
    forward = "F0.0 S>0.0\nR>1.0 F1.0"
    assert check(forward, training=False) == []
    assert check(forward) != []
    assert check(f"{forward} R1", training=False) == [
        "R1 on rank 1 reduces gradients, but the program has no training; remove it"
    ]
    (problem, _, _, _) = check(TWO, training=False)
    assert problem == "there is a backward of 0.0 on rank 0, but the program has no training; remove it"


def test_stages_are_found_where_they_are_computed() -> None:
    assert placement(parse_programs(SHARED)) == [(0,), (1, 2)]
    assert placement(parse_programs(PAIR)) == [(0, 3), (1, 2)]


def test_a_schedule_that_is_wrong_is_refused_before_it_runs() -> None:
    def forgetful(ranks: int, microbatches: int, /) -> list[Program]:
        return parse_programs(TWO.replace("B0.0", ""))

    with pytest.raises(BuildError, match=r"invalid program for 1 microbatch.*B0\.0 missing on rank 0.*choose another"):
        checked_programs(forgetful, 2, 1)
    with pytest.raises(BuildError, match=r"2 programs for 3 rank\(s\); a schedule must make one per rank"):
        checked_programs(lambda ranks, microbatches: parse_programs(TWO), 3, 1)


def test_a_schedule_may_have_several_stages_on_each_rank() -> None:
    assert len(checked_programs(lambda ranks, microbatches: parse_programs(SHARED), 2, 1)) == 2


class Odd(Action):
    """Action of a third party."""


def test_actions_of_others_are_left_to_them() -> None:
    first, second = parse_programs(TWO)
    assert validate([(Odd(0), *first), second], 2, 1) == []
