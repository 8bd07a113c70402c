from __future__ import annotations

import subprocess
import sys

import pytest
from d9d_core.program.index import ProgramIndex
from d9d_core.program.validation import validate
from d9d_core.schedule import Action, Backward, Forward, Overlap, Reduce, single_stage
from hypothesis import given
from hypothesis import strategies as st


@given(st.integers(min_value=1, max_value=40))
def test_the_single_stage_program_is_valid_for_every_number_of_microbatches(microbatches: int) -> None:
    programs = single_stage(1, microbatches)
    assert validate(programs, 1, microbatches) == []
    assert len(programs[0]) == 2 * microbatches + 1


@pytest.mark.parametrize(("forward", "backward"), [(3, 1), (0, 3)])
def test_microbatches_of_pairs_are_counted(forward: int, backward: int) -> None:
    pair = Overlap(Forward(0, forward), Backward(1, backward))
    assert ProgramIndex.of([[pair]]).microbatches == 4


def test_programs_print_compactly() -> None:
    assert " ".join(map(str, single_stage(1, 2)[0])) == "F0.0 B0.0 F0.1 B0.1 R0"


def test_the_single_stage_program_refuses_several_stages() -> None:
    with pytest.raises(ValueError, match="runs one stage, not 2; choose a pipeline schedule"):
        single_stage(2, 1)


@given(st.data())
def test_leaving_out_or_swapping_any_action_is_noticed(data: st.DataObject) -> None:
    microbatches = data.draw(st.integers(min_value=1, max_value=6))
    program = list(single_stage(1, microbatches)[0])
    index = data.draw(st.integers(min_value=0, max_value=len(program) - 1))
    assert validate([(*program[:index], *program[index + 1 :])], 1, microbatches)
    backward = data.draw(st.integers(min_value=0, max_value=microbatches - 1))
    moved = [action for action in program if action != Backward(0, backward)]
    assert validate([(Backward(0, backward), *moved)], 1, microbatches)


@pytest.mark.parametrize(
    ("extra", "problem"),
    [
        (Forward(0, 0), "F0.0 appears twice, on rank 0 and rank 0; remove one"),
        (Forward(0, 7), "F0.7 on rank 0: there are only 1 microbatches"),
        (Reduce(3), "R3 on rank 0: there are only 1 stages"),
    ],
)
def test_what_is_too_much_is_named(extra: Action, problem: str) -> None:
    (program,) = single_stage(1, 1)
    assert problem in validate([(*program, extra)], 1, 1)


def test_forward_and_backward_of_a_stage_belong_to_one_rank() -> None:
    problems = validate([(Forward(0, 0), Reduce(0)), (Backward(0, 0),)], 1, 1)
    assert problems == ["F0.0 is on rank 0 but B0.0 on rank 1: keep all actions of a stage on one rank"]


def test_programs_need_no_torch() -> None:
    code = "import sys, d9d_core.program.validation, d9d_core.program.text; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "False"


def test_a_stage_that_no_rank_computes_has_no_host_and_no_reduction() -> None:
    index = ProgramIndex.of([(Forward(1, 0), Reduce(1))], stages=3)
    assert (index.hosts, index.reduces) == ([-1, 0, -1], [-1, 1, -1])
