"""Every schedule keeps what holds for all, and the memory of its paper."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import pytest
from d9d_core.config import PluginConfig
from d9d_core.program.text import format_programs
from d9d_core.program.validation import placement, validate
from d9d_core.schedule import Forward, InputBackward, Overlap, Program, WeightBackward, count_stages
from d9d_pipeline.config import InterleavedConfig, LoopedBfsConfig, Zb1pConfig
from d9d_pipeline.schedule.breadth_first import gpipe, looped_bfs
from d9d_pipeline.schedule.dual_pipe_v import dual_pipe_v
from d9d_pipeline.schedule.inference import inference
from d9d_pipeline.schedule.one_forward_one_backward import (
    interleaved_one_forward_one_backward,
    one_forward_one_backward,
)
from d9d_pipeline.schedule.placement import loop, vee
from d9d_pipeline.schedule.units import rounds
from d9d_pipeline.schedule.zero_bubble import zb1p
from d9d_pipeline.schedule.zero_bubble_v import zero_bubble_v
from d9d_pipeline.simulator.run import simulate
from d9d_testing.suites.schedule import ScheduleSuite
from hypothesis import given, settings
from hypothesis import strategies as st

Settings = Mapping[str, Any]


class Ours(ScheduleSuite):
    plugin = "d9d_pipeline.plugin"


@pytest.mark.thorough
class TestGPipe(Ours):
    target = "gpipe"

    def most_held(self, ranks: int, microbatches: int, settings: Settings) -> float:
        return microbatches


@pytest.mark.full
class TestLoopedBfs(Ours):
    target = "looped_bfs"
    settings: ClassVar = ({}, {"stages_per_rank": 3})

    def most_held(self, ranks: int, microbatches: int, settings: Settings) -> float:
        return microbatches


@pytest.mark.thorough
class TestOneForwardOneBackward(Ours):
    target = "1f1b"

    def most_held(self, ranks: int, microbatches: int, settings: Settings) -> float:
        return min(ranks, microbatches)


@pytest.mark.thorough
class TestInterleaved(Ours):
    """Megatron: (stages_per_rank - 1) * ranks + 2 * (ranks - 1) + 1 stages; here rounds may be longer than ranks."""

    target = "interleaved_1f1b"
    settings: ClassVar = ({}, {"stages_per_rank": 1}, {"stages_per_rank": 3})

    def most_held(self, ranks: int, microbatches: int, settings: Settings) -> float:
        stages: int = settings.get("stages_per_rank", 2)
        return min(microbatches, ((stages - 1) * longest(ranks, microbatches) + 2 * ranks - 1) / stages)


@pytest.mark.thorough
class TestZb1p(Ours):
    """The memory of 1F1B."""

    target = "zb1p"
    settings: ClassVar = ({}, {"stages_per_rank": 2}, {"stages_per_rank": 3})

    def most_held(self, ranks: int, microbatches: int, settings: Settings) -> float:
        stages: int = settings.get("stages_per_rank", 1)
        return min(microbatches, ((stages - 1) * longest(ranks, microbatches) + ranks) / stages)


@pytest.mark.thorough
class TestZeroBubbleV(Ours):
    """The memory of 1F1B: 2 * ranks halves."""

    target = "zero_bubble_v"

    def most_held(self, ranks: int, microbatches: int, settings: Settings) -> float:
        return min(ranks, microbatches)


@pytest.mark.thorough
class TestDualPipeV(Ours):
    """2 * ranks + 1 halves."""

    target = "dual_pipe_v"

    def least_microbatches(self, ranks: int, settings: Settings) -> int:
        return 2 * ranks

    def most_held(self, ranks: int, microbatches: int, settings: Settings) -> float:
        return ranks + 0.5


def longest(ranks: int, microbatches: int) -> int:
    return max(map(len, rounds(microbatches, ranks)))


Generator = Callable[[int, int], Sequence[Program]]
ALL: dict[str, Generator] = {
    "gpipe": gpipe,
    "looped_bfs": looped_bfs,
    "1f1b": one_forward_one_backward,
    "interleaved_1f1b": interleaved_one_forward_one_backward,
    "interleaved_1f1b x 4": partial(interleaved_one_forward_one_backward, stages_per_rank=4),
    "zb1p": zb1p,
    "zb1p x 2": partial(zb1p, stages_per_rank=2),
    "zb1p x 5": partial(zb1p, stages_per_rank=5),
    "zero_bubble_v": zero_bubble_v,
    "dual_pipe_v": dual_pipe_v,
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", ALL)
@settings(max_examples=15)
@given(ranks=st.integers(1, 12), extra=st.integers(0, 40))
def test_programs_are_sound_for_any_numbers(name: str, ranks: int, extra: int) -> None:
    microbatches = extra + (2 * ranks if name == "dual_pipe_v" else 1)
    programs = ALL[name](ranks, microbatches)
    assert validate(programs, count_stages(programs), microbatches, buffers=1) == []
    evaluation = inference(tuple(placement(programs)), microbatches)
    assert validate(evaluation, count_stages(programs), microbatches, training=False, buffers=1) == []
    assert placement(evaluation) == placement(programs)


@pytest.mark.parametrize(
    ("name", "microbatches", "text"),
    [
        (
            "gpipe",
            2,
            "F0.0 S>0.0 R<0.0 F0.1 S>0.1 R<0.1 B0.0 B0.1 R0\n"
            "R>1.0 R>1.1 F1.0 F1.1 B1.0 S<1.0 B1.1 S<1.1 R1",
        ),
        (
            "1f1b",
            3,
            "F0.0 S>0.0 R<0.0 F0.1 S>0.1 B0.0 R<0.1 F0.2 S>0.2 R<0.2 B0.1 B0.2 R0\n"
            "R>1.0 F1.0 R>1.1 B1.0 S<1.0 F1.1 R>1.2 B1.1 S<1.1 F1.2 B1.2 S<1.2 R1",
        ),
    ],
)  # fmt: skip
def test_the_smallest_programs_are_as_drawn_in_the_papers(name: str, microbatches: int, text: str) -> None:
    assert format_programs(ALL[name](2, microbatches)) == text


def test_a_rank_of_1f1b_holds_one_microbatch_less_than_the_rank_before() -> None:
    for rank, program in enumerate(one_forward_one_backward(4, 12)):
        letters = "".join(str(action)[0] for action in program if str(action)[:2] in (f"F{rank}", f"B{rank}"))
        assert letters.index("B") == 4 - rank
        assert letters[4 - rank :] == "BF" * (8 + rank) + "B" * (4 - rank)


def test_gradients_of_weights_wait_one_backward_longer_on_each_rank() -> None:
    for rank, program in enumerate(zb1p(4, 12)):
        computed = [action for action in program if isinstance(action, InputBackward | WeightBackward)]
        first = next(at for at, action in enumerate(computed) if isinstance(action, WeightBackward))
        assert first == rank + 1


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_with_few_microbatches_gradients_of_weights_fill_the_gaps(ranks: int) -> None:
    """No step can be shorter: the last rank starts late by half a forward for each other rank."""
    assert simulate(zero_bubble_v(ranks, ranks)).makespan == 3 * ranks + (ranks - 1) / 2
    for program in zero_bubble_v(ranks, ranks):
        computed = [action for action in program if isinstance(action, InputBackward | WeightBackward)]
        assert [type(action) for action in computed] != [InputBackward, WeightBackward] * (2 * ranks)


def test_gradients_of_weights_wait_where_no_rank_would() -> None:
    computed = [action for action in zero_bubble_v(2, 1)[1] if isinstance(action, InputBackward | WeightBackward)]
    assert " ".join(map(str, computed)) == "I2.0 I1.0 W2.0 W1.0"


def test_dual_pipe_v_overlaps_most_forwards() -> None:
    for rank, program in enumerate(dual_pipe_v(4, 20)):
        pairs = sum(isinstance(action, Overlap) for action in program)
        alone = sum(isinstance(action, Forward) for action in program)
        assert pairs + alone == 40
        assert alone == 2 * 3 - 2 * rank + 2 * (rank + 1) + (3 - rank) + (rank == 3)


def test_placements_are_rings_and_vees() -> None:
    assert loop(3, 2) == ((0, 3), (1, 4), (2, 5))
    assert vee(3) == ((0, 5), (1, 4), (2, 3))
    assert placement(looped_bfs(3, 3)) == list(loop(3, 2))
    assert placement(zero_bubble_v(3, 5)) == placement(dual_pipe_v(3, 6)) == list(vee(3))


def test_rounds_have_as_many_microbatches_as_ranks_or_a_few_more() -> None:
    assert [list(group) for group in rounds(8, 4)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [len(group) for group in rounds(11, 4)] == [5, 6]
    assert [len(group) for group in rounds(3, 4)] == [3]


@pytest.mark.parametrize(
    ("ranks", "microbatches", "text"), [(4, 7, "at least 8"), (0, 1, "is 0; it must be at least 1")]
)
def test_numbers_that_make_no_pipeline_are_refused(ranks: int, microbatches: int, text: str) -> None:
    with pytest.raises(ValueError, match=f"^dual_pipe_v: .*{text}"):
        dual_pipe_v(ranks, microbatches)


def test_an_evaluation_of_no_microbatches_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^inference: 0 microbatch\(es\) are too few"):
        inference(loop(2, 1), 0)


@pytest.mark.parametrize("config", [LoopedBfsConfig, InterleavedConfig, Zb1pConfig])
def test_schedules_with_loops_take_one_stage_per_rank(config: type[PluginConfig]) -> None:
    assert config.model_validate({"stages_per_rank": 1}).model_dump()["stages_per_rank"] == 1
