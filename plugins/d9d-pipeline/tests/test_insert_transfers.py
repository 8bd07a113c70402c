"""Communication is inserted where it hides behind computation and no rank waits for memory."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import pytest
from d9d_core.program.text import format_programs, parse_programs
from d9d_core.program.validation import validate
from d9d_core.schedule import Action, Backward, Forward, MicrobatchAction, Program, ReceiveActivation, ReceiveGradient
from d9d_pipeline.schedule.breadth_first import gpipe, looped_bfs
from d9d_pipeline.schedule.dual_pipe_v import dual_pipe_v
from d9d_pipeline.schedule.ideal_timing import ideal_starts
from d9d_pipeline.schedule.insert_transfers import insert_transfers, just_in_time
from d9d_pipeline.schedule.one_forward_one_backward import (
    interleaved_one_forward_one_backward,
    one_forward_one_backward,
)
from d9d_pipeline.schedule.placement import loop, vee
from d9d_pipeline.simulator.costs import Costs
from d9d_pipeline.simulator.memory import inbox
from d9d_pipeline.simulator.run import simulate


def orders(text: str) -> list[Program]:
    return parse_programs(text)


def test_tensors_are_sent_at_once_and_memory_is_offered_one_computation_ahead() -> None:
    programs = insert_transfers(orders("F0.0 F0.1 B0.0 B0.1\nF1.0 B1.0 F1.1 B1.1"), loop(2, 1))
    assert format_programs(programs) == (
        "F0.0 S>0.0 R<0.0 F0.1 S>0.1 R<0.1 B0.0 B0.1 R0\n"
        "R>1.0 F1.0 R>1.1 B1.0 S<1.0 F1.1 B1.1 S<1.1 R1"
    )  # fmt: skip


def test_what_arrives_when_it_is_needed_is_received_just_in_time_and_what_is_sent_in_advance_sooner() -> None:
    text = "F0.0 F0.1 F0.2 B0.0 B0.1 B0.2\nF1.0 B1.0 F1.1 B1.1 F1.2 B1.2"
    first, second = just_in_time(insert_transfers(orders(text), loop(2, 1)))
    assert {str(action) for action in first} == {"R<0.0", "R<0.1", "R<0.2"}
    assert {str(action) for action in second} == {"R>1.0"}


def test_neighbours_on_one_rank_send_nothing() -> None:
    programs = insert_transfers(orders("F0.0 F3.0 B3.0 B0.0\nF1.0 F2.0 B2.0 B1.0"), vee(2))
    assert format_programs(programs) == (
        "R>3.0 F0.0 S>0.0 F3.0 R<0.0 B3.0 S<3.0 R3 B0.0 R0\n"
        "R>1.0 F1.0 R<2.0 F2.0 S>2.0 B2.0 R2 B1.0 S<1.0 R1"
    )  # fmt: skip


def test_an_overlapped_pair_sends_both_of_its_tensors() -> None:
    text = "F0.0 F0.1 B0.0 B0.1\nF1.0 F1.1+B1.0 B1.1\nF2.0 B2.0 F2.1 B2.1"
    programs = insert_transfers(orders(text), loop(3, 1))
    assert validate(programs, 3, 2) == []
    assert "F1.1+B1.0 S>1.1 S<1.0" in format_programs(programs)


def test_receives_keep_the_order_of_sending_where_tensors_are_used_in_another() -> None:
    first, _ = insert_transfers(orders("F0.0 F0.1 B0.0 B0.1\nF1.0 F1.1 B1.1 B1.0"), loop(2, 1))
    receives = [str(action) for action in first if isinstance(action, ReceiveGradient)]
    assert receives == ["R<0.1", "R<0.0"]


def test_memory_is_offered_in_time_for_a_sender_that_is_far_ahead() -> None:
    # All microbatches have passed the first stages before the first rank takes one for its second stage.
    for ranks, microbatches in ((2, 12), (4, 20)):
        programs = looped_bfs(ranks, microbatches)
        assert simulate(programs, buffers=1).makespan == simulate(programs).makespan
        (first, *_) = programs
        early = [str(action) for action in first[: first.index(Forward(ranks, 0))]]
        assert f"R>{ranks}.{microbatches - ranks - 1}" in early


@pytest.mark.parametrize(
    "programs",
    [gpipe(4, 12), interleaved_one_forward_one_backward(4, 12), one_forward_one_backward(4, 12), dual_pipe_v(4, 12)],
    ids=["gpipe", "interleaved_1f1b", "1f1b", "dual_pipe_v"],
)
def test_a_short_transfer_costs_nobody_more_than_its_own_time(programs: Sequence[Program]) -> None:
    """Against receives that are all offered before everything else."""
    eager = [tuple(sorted(program, key=lambda action: not is_receive(action))) for program in programs]
    costs = Costs(transfer=0.2)
    assert simulate(programs, costs).makespan == pytest.approx(simulate(eager, costs).makespan)


def is_receive(action: Action) -> bool:
    return isinstance(action, ReceiveActivation | ReceiveGradient)


def test_orders_that_wait_for_one_another_start_never() -> None:
    assert ideal_starts(orders("F0.0 B0.0 F0.1 B0.1\nF1.1 B1.1 F1.0 B1.0")) == [[0, inf, inf, inf], [inf] * 4]
    assert ideal_starts(orders("F0.0 F0.1 B0.0 B0.1\nF1.0 B1.0 F1.1 B1.1")) == [[0, 1, 4, 7], [1, 2, 4, 5]]


def test_a_stage_reduces_once_after_its_last_gradients() -> None:
    for rank, program in enumerate(interleaved_one_forward_one_backward(2, 4)):
        words = [str(action) for action in program]
        for stage in (rank, rank + 2):
            last = max(at for at, word in enumerate(words) if word.startswith(f"B{stage}."))
            assert words.index(f"R{stage}") > last
            between = program[last + 1 : words.index(f"R{stage}")]
            assert all(isinstance(action, MicrobatchAction) and not isinstance(action, Backward) for action in between)


def test_a_received_tensor_is_kept_until_a_computation_uses_it() -> None:
    received = [ReceiveActivation(1, microbatch) for microbatch in range(3)]
    assert inbox((received[0], Forward(1, 0), received[1], received[2])) == 2
    assert inbox((*received, Forward(1, 0), Forward(1, 1), ReceiveGradient(1, 0), Backward(1, 0))) == 3
