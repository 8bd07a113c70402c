"""Programs print compactly, read back as they were, and say how they differ."""

from __future__ import annotations

import pytest
from d9d_core.program.text import diff_programs, format_programs, parse_action, parse_programs
from d9d_core.schedule import (
    Action,
    Backward,
    Forward,
    InputBackward,
    Overlap,
    ReceiveActivation,
    ReceiveGradient,
    Reduce,
    SendActivation,
    SendGradient,
    WeightBackward,
    count_stages,
)
from hypothesis import given
from hypothesis import strategies as st

numbers = st.integers(min_value=0, max_value=2000)
forwards = st.builds(Forward, numbers, numbers)
PLAIN = (
    Forward, Backward, InputBackward, WeightBackward, SendActivation, ReceiveActivation, SendGradient, ReceiveGradient,
)  # fmt: skip
plain = st.sampled_from(PLAIN).flatmap(lambda kind: st.builds(kind, numbers, numbers))
backwards = st.builds(Backward, numbers, numbers) | st.builds(InputBackward, numbers, numbers)
actions: st.SearchStrategy[Action] = plain | st.builds(Reduce, numbers) | st.builds(Overlap, forwards, backwards)


def test_every_action_prints_as_a_letter_its_stage_and_its_microbatch() -> None:
    printed = {
        "F1.2": Forward(1, 2),
        "B1.2": Backward(1, 2),
        "I1.2": InputBackward(1, 2),
        "W1.2": WeightBackward(1, 2),
        "S>1.2": SendActivation(1, 2),
        "R>1.2": ReceiveActivation(1, 2),
        "S<1.2": SendGradient(1, 2),
        "R<1.2": ReceiveGradient(1, 2),
        "R1": Reduce(1),
        "F1.2+B3.4": Overlap(Forward(1, 2), Backward(3, 4)),
    }
    assert {str(action): action for action in printed.values()} == printed


@pytest.mark.thorough
@given(st.lists(st.lists(actions).map(tuple), min_size=1))
def test_programs_read_back_as_they_were(programs: list[tuple[Action, ...]]) -> None:
    # An empty program at the end is an empty line, which a text does not keep.
    programs.append((Reduce(0),))
    assert parse_programs(format_programs(programs)) == programs


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("X0.1", "'X0.1' is not an action; actions of stage 0 and microbatch 3 are F0.3 B0.3"),
        ("F0", "'F0' is not an action"),
        ("R0.1", "'R0.1' is not an action"),
        ("B0.1+F0.2", "is not an overlapped pair of a forward and a backward, such as F0.3"),
        ("F0.1+F0.2", "is not an overlapped pair"),
    ],
)
def test_what_is_no_action_is_said(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem.replace("+", r"\+").replace(".", r"\.")):
        parse_action(text)


def test_a_difference_is_named_by_its_place() -> None:
    left = parse_programs("F0.0 F0.1 B0.0 B0.1 R0\nF1.0\nR2")
    right = parse_programs("F0.0 B0.0 F0.1 B0.1 R0\nF1.0")
    assert diff_programs(left, left) == []
    assert diff_programs(left, right) == [
        "rank 0, position 1: nothing became B0.0",
        "rank 0, position 2: B0.0 became nothing",
        "rank 2: only on the left",
    ]


def test_an_overlapped_pair_is_about_the_stage_of_its_forward() -> None:
    assert Overlap(Forward(1, 0), Backward(6, 0)).stage == 1
    assert count_stages([(Overlap(Forward(1, 0), Backward(6, 0)), Backward(6, 1))]) == 7
    assert count_stages([]) == 0


def test_actions_that_repeat_often_are_compared_like_others() -> None:
    repeated = [Forward(0, 0)] * 250
    assert diff_programs([repeated], [[*repeated, Backward(0, 0)]]) == ["rank 0, position 250: nothing became B0.0"]
