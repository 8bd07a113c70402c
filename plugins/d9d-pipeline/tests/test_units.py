"""Sizes that schedules refuse, groups of microbatches, and places of stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from d9d_core.schedule import Backward, Forward
from d9d_pipeline.schedule.breadth_first import gpipe, looped_bfs
from d9d_pipeline.schedule.dual_pipe_v import dual_pipe_v
from d9d_pipeline.schedule.inference import inference
from d9d_pipeline.schedule.one_forward_one_backward import (
    interleaved_one_forward_one_backward,
    one_forward_one_backward,
)
from d9d_pipeline.schedule.placement import loop, vee
from d9d_pipeline.schedule.units import check, depth_first, rounds
from d9d_pipeline.schedule.zero_bubble import zb1p
from d9d_pipeline.schedule.zero_bubble_v import zero_bubble_v


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("gpipe", gpipe),
        ("looped_bfs", looped_bfs),
        ("1f1b", one_forward_one_backward),
        ("interleaved_1f1b", interleaved_one_forward_one_backward),
        ("zb1p", zb1p),
        ("zero_bubble_v", zero_bubble_v),
        ("dual_pipe_v", dual_pipe_v),
        ("inference", lambda ranks, microbatches: inference(loop(ranks, 1), microbatches)),
    ],
)
def test_every_schedule_refuses_no_ranks_and_too_few_microbatches(name: str, schedule: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=rf"^{name}: the number of pipeline ranks is 0; it must be at least 1$"):
        schedule(0, 4)
    least = 4 if name == "dual_pipe_v" else 1
    few = rf"^{name}: {least - 1} microbatch\(es\) are too few for 2 pipeline rank\(s\); at least {least}: raise batch"
    with pytest.raises(ValueError, match=few):
        schedule(2, least - 1)
    assert len(schedule(2, least)) == 2


def test_numbers_that_a_schedule_supports_pass() -> None:
    check("s", 1, 1)
    check("s", 3, 6, least=6)
    with pytest.raises(ValueError, match="5 microbatch"):
        check("s", 3, 5, least=6)
    with pytest.raises(ValueError, match="pipeline ranks is -1"):
        check("s", -1, 5)


@pytest.mark.parametrize(
    ("microbatches", "ranks", "edges"),
    [(1, 4, [0, 1]), (4, 4, [0, 4]), (7, 4, [0, 7]), (8, 4, [0, 4, 8]), (11, 4, [0, 5, 11]), (3, 1, [0, 1, 2, 3])],
)
def test_groups_have_at_least_as_many_microbatches_as_ranks(microbatches: int, ranks: int, edges: list[int]) -> None:
    assert rounds(microbatches, ranks) == [range(edges[i], edges[i + 1]) for i in range(len(edges) - 1)]


def test_a_group_passes_all_stages_before_the_next_group() -> None:
    assert depth_first([1, 3], [range(2), range(2, 3)]) == [(1, 0), (1, 1), (3, 0), (3, 1), (1, 2), (3, 2)]
    assert depth_first([], [range(2)]) == []


def test_stages_are_in_turn_or_there_and_back() -> None:
    assert loop(2, 2) == ((0, 2), (1, 3))
    assert loop(1, 3) == ((0, 1, 2),)
    assert loop(3, 1) == ((0,), (1,), (2,))
    assert vee(2) == ((0, 3), (1, 2))
    assert vee(3) == ((0, 5), (1, 4), (2, 3))


def test_breadth_first_takes_all_forwards_and_then_all_backwards_from_the_last_stage_on() -> None:
    programs = looped_bfs(2, 2)
    order = [action for action in programs[0] if isinstance(action, (Forward, Backward))]
    assert order == [
        Forward(0, 0), Forward(0, 1), Forward(2, 0), Forward(2, 1),
        Backward(2, 0), Backward(2, 1), Backward(0, 0), Backward(0, 1),
    ]  # fmt: skip
    assert [len(gpipe(1, count)[0]) for count in (1, 2, 5)] == [3, 5, 11]  # and the reduction
    last = [action for action in gpipe(3, 2)[2] if isinstance(action, (Forward, Backward))]
    assert last == [Forward(2, 0), Forward(2, 1), Backward(2, 0), Backward(2, 1)]
