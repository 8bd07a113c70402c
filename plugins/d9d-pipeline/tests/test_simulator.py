"""Simulated times follow the rules and the theory of the papers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
from d9d_core.errors import BuildError
from d9d_core.program.text import parse_programs
from d9d_core.schedule import (
    Action,
    Backward,
    Forward,
    InputBackward,
    Overlap,
    Program,
    ReceiveActivation,
    ReceiveGradient,
    SendActivation,
    SendGradient,
    WeightBackward,
    compute_parts,
)
from d9d_pipeline.schedule.breadth_first import gpipe, looped_bfs
from d9d_pipeline.schedule.dual_pipe_v import dual_pipe_v
from d9d_pipeline.schedule.inference import inference
from d9d_pipeline.schedule.one_forward_one_backward import (
    interleaved_one_forward_one_backward,
    one_forward_one_backward,
)
from d9d_pipeline.schedule.order_builder import OrderBuilder
from d9d_pipeline.schedule.zero_bubble import zb1p
from d9d_pipeline.schedule.zero_bubble_v import zero_bubble_v
from d9d_pipeline.simulator.costs import Costs, of_stages
from d9d_pipeline.simulator.run import simulate
from hypothesis import given, settings
from hypothesis import strategies as st

TWO = "F0.0 S>0.0 F0.1 S>0.1 R<0.0 B0.0 R<0.1 B0.1 R0\nR>1.0 F1.0 R>1.1 B1.0 S<1.0 F1.1 B1.1 S<1.1 R1"
GENERATORS: list[Generator] = [
    one_forward_one_backward,
    looped_bfs,
    interleaved_one_forward_one_backward,
    zb1p,
    zero_bubble_v,
    dual_pipe_v,
]

Generator = Callable[[int, int], Sequence[Program]]


def naive(programs: list[Program], costs: Costs, stages: int, buffers: int | None) -> float:
    """The rules of the docstring of ``simulate``, applied again and again until nothing changes any more."""
    hosts = {action.stage: rank for rank, program in enumerate(programs) for action in program}
    each = [list(hosts.values()).count(hosts[stage]) for stage in range(stages)]
    assert isinstance(costs.forward, float)
    assert isinstance(costs.backward, float)
    assert isinstance(costs.weight, float)
    lasting: dict[type[Action], float] = {
        Forward: costs.forward, Backward: costs.backward, WeightBackward: costs.weight,
        InputBackward: costs.backward - costs.weight,
    }  # fmt: skip
    transfers: list[tuple[Action, Action]] = []
    for program in programs:
        for action in program:
            if isinstance(action, SendActivation):
                transfers.append((action, ReceiveActivation(action.stage + 1, action.microbatch)))
            elif isinstance(action, SendGradient):
                transfers.append((action, ReceiveGradient(action.stage - 1, action.microbatch)))
    ready: dict[Action, float] = {}
    there: dict[Action, float] = {}  # by the receive
    for _ in range(10_000):
        clocks = []
        for program in programs:
            clock = 0.0
            for action in program:
                needs: list[Action] = []
                spent = 0.0
                for part in compute_parts(action):
                    if isinstance(part, Forward):
                        needs.append(ReceiveActivation(part.stage, part.microbatch))
                    elif isinstance(part, Backward | InputBackward):
                        needs.append(ReceiveGradient(part.stage, part.microbatch))
                    if type(part) in lasting:
                        spent += lasting[type(part)] / each[part.stage]
                if isinstance(action, Overlap):
                    halves = [lasting[type(part)] / each[part.stage] for part in compute_parts(action)]
                    spent -= costs.overlap * min(halves)
                if isinstance(action, SendActivation | SendGradient) and buffers is not None:
                    peer = hosts[dict(transfers)[action].stage]
                    channel = [
                        r for s, r in transfers if hosts[s.stage] == hosts[action.stage] and hosts[r.stage] == peer
                    ]
                    at = channel.index(dict(transfers)[action])
                    needs += channel[at - buffers : at - buffers + 1] if at >= buffers else []
                clock = max([clock, *(there.get(need, 0.0) for need in needs)])
                ready[action] = clock
                clock += spent
            clocks.append(clock)
        before = dict(there)
        free: dict[tuple[int, int], float] = {}
        for send, receive in transfers:
            channel_key = (hosts[send.stage], hosts[receive.stage])
            there[receive] = max(ready[send], ready[receive], free.get(channel_key, 0.0)) + costs.transfer
            free[channel_key] = there[receive]
        if there == before:
            return max(clocks)
    raise AssertionError("times still change")


times = st.floats(min_value=0.1, max_value=3.0)


@pytest.mark.full
@settings(max_examples=60)
@given(
    generator=st.sampled_from(GENERATORS),
    ranks=st.integers(1, 4),
    extra=st.integers(0, 5),
    forward=times,
    inputs=times,
    weight=times,
    transfer=st.floats(0, 2),
    overlap=st.floats(0, 1),
    buffers=st.sampled_from([None, 1, 2]),
)
def test_times_are_those_of_the_rules(
    generator: Generator,
    ranks: int,
    extra: int,
    forward: float,
    inputs: float,
    weight: float,
    transfer: float,
    overlap: float,
    buffers: int | None,
) -> None:
    microbatches = extra + (2 * ranks if generator is dual_pipe_v else 1)
    programs = list(generator(ranks, microbatches))
    costs = Costs(forward, inputs + weight, weight, transfer, overlap)
    step = simulate(programs, costs, buffers=buffers)
    assert step.makespan == pytest.approx(naive(programs, costs, step.index.stages, buffers))


@settings(max_examples=60)
@given(
    generator=st.sampled_from(GENERATORS),
    ranks=st.integers(1, 5),
    extra=st.integers(0, 8),
    forward=times,
    transfer=st.floats(0, 2),
    buffers=st.sampled_from([None, 1]),
)
def test_the_critical_path_has_no_gap(
    generator: Generator, ranks: int, extra: int, forward: float, transfer: float, buffers: int | None
) -> None:
    programs = generator(ranks, extra + 2 * ranks)
    costs = Costs(forward, 2.0, 1.0, transfer)
    step = simulate(programs, costs, buffers=buffers)
    durations = {span.action: span.end - span.begin for rank in range(ranks) for span in step.spans(rank)}
    total = sum(durations.get(action, transfer) for action in step.critical_path)
    assert total == pytest.approx(step.makespan)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("rounds", [2, 4])
def test_bubbles_are_those_of_the_papers(ranks: int, rounds: int) -> None:
    microbatches = ranks * rounds
    ideal = 3 * microbatches

    def idle(time: float) -> object:
        return pytest.approx(time / (time + ideal))

    assert simulate(one_forward_one_backward(ranks, microbatches)).bubble == idle(3 * (ranks - 1))
    for stages in (2, 3):
        for generator in (interleaved_one_forward_one_backward, looped_bfs):
            programs = generator(ranks, microbatches, stages_per_rank=stages)
            assert simulate(programs).bubble == idle(3 * (ranks - 1) / stages)
        assert simulate(zb1p(ranks, microbatches, stages_per_rank=stages)).bubble == idle((ranks - 1) / stages)
    # (p - 1) (F + I - W); the times of a V are of halves: (p - 1) (F&B + B - 3 W)
    assert simulate(zb1p(ranks, microbatches), Costs(2.0, 4.0, 1.5)).bubble == pytest.approx(
        (ranks - 1) * 3 / (6 * microbatches + (ranks - 1) * 3)
    )
    assert simulate(dual_pipe_v(ranks, microbatches)).bubble == idle(ranks - 1)
    assert simulate(zero_bubble_v(ranks, microbatches)).inner_bubble == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_one_microbatch_passes_all_stages_and_all_crossings_twice(ranks: int) -> None:
    forward, backward, weight, transfer = 2.0, 5.0, 1.5, 0.75
    costs = Costs(forward, backward, weight, transfer)

    def time(computed: float, crossings: int) -> object:
        return pytest.approx(computed + 2 * crossings * transfer)

    whole, apart = ranks * (forward + backward), ranks * (forward + backward - weight)
    assert simulate(one_forward_one_backward(ranks, 1), costs).makespan == time(whole, ranks - 1)
    for stages in (1, 2, 3):
        crossings = stages * ranks - 1
        assert simulate(looped_bfs(ranks, 1, stages_per_rank=stages), costs).makespan == time(whole, crossings)
        # Only weight gradients of the first stage come after everything else.
        programs = zb1p(ranks, 1, stages_per_rank=stages)
        assert simulate(programs, costs).makespan == time(apart + weight / stages, crossings)


@pytest.mark.parametrize("microbatches", [1, 2, 5, 12])
def test_transfers_take_time_in_the_ramps_of_gpipe_and_in_each_round_trip_of_1f1b(microbatches: int) -> None:
    costs = Costs(2.0, 5.0, 1.5, transfer=0.75)
    for ranks in (2, 3, 5):
        # Huang et al. 2019, "GPipe", section 2.3; transfers hide behind computation in between.
        step = simulate(gpipe(ranks, microbatches), costs)
        assert step.makespan == pytest.approx((microbatches + ranks - 1) * 7.0 + 2 * (ranks - 1) * 0.75)
    # Narayanan et al. 2019, "PipeDream", section 3.2: the first of two ranks has two microbatches on their way, and
    # waits until the older one is back before it admits another.
    round_trips = 1 + max(0, math.ceil((microbatches - 2) / 2))
    step = simulate(one_forward_one_backward(2, microbatches), costs)
    assert step.makespan == pytest.approx((microbatches + 1) * 7.0 + round_trips * 2 * 0.75)


def test_costs_may_differ_by_stage() -> None:
    programs = one_forward_one_backward(2, 4)
    even, uneven = simulate(programs), simulate(programs, Costs(forward=[1.0, 2.0], backward=[2.0, 4.0], weight=[1, 2]))
    assert uneven.busy == [12, 24]
    assert even.busy == [12, 12]
    assert uneven.makespan > even.makespan
    assert simulate(programs, Costs(memory=[1.0, 0.25])).peak_live == [2.0, 0.25]
    with pytest.raises(ValueError, match="costs: forward has 3 numbers for 2 stages"):
        simulate(programs, Costs(forward=[1, 2, 3]))
    with pytest.raises(
        ValueError, match="costs: on stage 1 weight is 3, more than the whole backward, 2; use at most that"
    ):
        simulate(programs, Costs(weight=[1, 3]))


def test_a_rank_waits_when_its_tensors_may_not_pile_up() -> None:
    programs = parse_programs(
        "F0.0 S>0.0 F0.1 S>0.1 F0.2 S>0.2 F0.3 S>0.3\nR>1.0 F1.0 R>1.1 F1.1 R>1.2 F1.2 R>1.3 F1.3"
    )
    costs = Costs(forward=[1.0, 5.0], memory=0.0)
    free = simulate(programs, costs, training=False)
    bounded = simulate(programs, costs, training=False, buffers=1)
    assert [span.begin for span in free.spans(0)] == [0, 1, 2, 3]
    assert [span.begin for span in bounded.spans(0)] == [0, 1, 2, 6]
    assert bounded.makespan == free.makespan == 21


def test_memory_is_held_from_the_forward_to_the_gradients_of_weights() -> None:
    whole = simulate(parse_programs("F0.0 F0.1 B0.0 F0.2 B0.1 B0.2 R0"))
    split = simulate(parse_programs("F0.0 F0.1 I0.0 F0.2 W0.0 I0.1 W0.1 I0.2 W0.2 R0"))
    paired = simulate(parse_programs("F0.0 F0.1+B0.0 B0.1 R0"))
    assert (whole.peak_live, split.peak_live, paired.peak_live) == ([2], [3], [2])
    assert simulate(parse_programs("F0.0 F0.1"), training=False).peak_live == [1]


def test_what_crosses_ranks_is_counted() -> None:
    step = simulate(parse_programs(TWO))
    assert (step.sent, step.volume, step.inbox) == ([2, 2], 4, [1, 1])
    assert simulate(interleaved_one_forward_one_backward(4, 8)).volume == 2 * 8 * 7
    assert simulate(zero_bubble_v(4, 8)).volume == 2 * 8 * 6  # the bottom of the V is one rank


def test_an_overlapped_pair_hides_what_the_costs_say() -> None:
    programs = parse_programs("F0.0 F0.1+B0.0 B0.1 R0")
    assert simulate(programs).makespan == 6
    assert simulate(programs, Costs(overlap=1.0)).makespan == 5
    assert simulate(programs, Costs(overlap=0.5)).makespan == 5.5


def test_invalid_programs_are_refused_with_the_actions() -> None:
    with pytest.raises(BuildError, match=r"pipeline: invalid programs: B0\.1 missing on rank 0"):
        simulate(parse_programs(TWO.replace("B0.1", "")))


def test_a_deadlock_is_named_with_its_actions() -> None:
    cycle = TWO.replace("F0.0 S>0.0 F0.1 S>0.1 R<0.0 B0.0", "F0.0 S>0.0 R<0.0 F0.1 B0.0 S>0.1").replace(
        "B1.0 S<1.0 F1.1", "F1.1 B1.0 S<1.0"
    )
    with pytest.raises(
        BuildError, match=r"deadlock: rank 0 at B0\.0 waits for S<1\.0 on rank 1; rank 1 at F1\.1 waits"
    ):
        simulate(parse_programs(cycle))


def test_a_rank_without_actions_is_simulated() -> None:
    assert simulate([*parse_programs("F0.0 B0.0 R0"), ()]).makespan == pytest.approx(3.0)


def test_inference_can_be_simulated() -> None:
    step = simulate(inference(((0, 2), (1, 3)), 4), training=False)
    assert step.makespan == pytest.approx(4 + 0.5)
    assert step.peak_live == [0.5, 0.5]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("q=1", r"'q' in 'q=1' is unknown; use f \(forward\), b \(backward\)"),
        ("f", "'f' in 'f' has no number; write f=1.5"),
        ("f=-1", "forward is -1.0; it must be 0 or more, and finite"),
        ("f=nan", "forward is nan"),
        ("t=inf", "transfer is inf"),
        ("b=1,w=2", "w=2 in 'b=1,w=2' is more than the whole backward, 1; use at most that"),
        ("o=2", "overlap is 2.0; use a number from 0"),
    ],
)
def test_costs_that_mean_nothing_are_refused(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Costs.parse(text)


def test_costs_are_read_from_text() -> None:
    assert Costs.parse("f=2,b=5, w=2,t=0.1,o=0.5") == Costs(2.0, 5.0, 2.0, 0.1, 0.5)
    assert Costs.parse("b=4") == Costs(1.0, 4.0, 2.0)
    assert Costs.parse("") == Costs()


@pytest.mark.full
def test_a_thousand_ranks_are_simulated() -> None:
    step = simulate(one_forward_one_backward(1024, 64))
    assert step.makespan == pytest.approx(3 * (64 + 1023))
    assert max(step.peak_live) == 64


def test_a_step_of_two_ranks_is_timed_action_by_action() -> None:
    step = simulate(one_forward_one_backward(2, 2), Costs(forward=1.0, backward=3.0, weight=1.0, transfer=0.5))
    assert [[(str(span.action), span.begin, span.end) for span in step.spans(rank)] for rank in range(2)] == [
        [("F0.0", 0.0, 1.0), ("F0.1", 1.0, 2.0), ("B0.0", 6.0, 9.0), ("B0.1", 10.0, 13.0)],
        [("F1.0", 1.5, 2.5), ("B1.0", 2.5, 5.5), ("F1.1", 5.5, 6.5), ("B1.1", 6.5, 9.5)],
    ]
    assert (step.makespan, step.busy) == (13.0, [8.0, 8.0])
    assert step.bubble == pytest.approx(1 - 16 / 26)
    assert step.inner_bubble == pytest.approx(1 - 8 / 13)  # of the first rank; the second works all the time
    assert [str(action) for action in step.critical_path] == [
        "F0.0", "S>0.0", "F1.0", "B1.0", "F1.1", "B1.1", "S<1.1", "B0.1",
    ]  # fmt: skip
    # Memory for the second gradient of the first rank is offered one computation ahead, so before the first is used.
    assert (step.peak_live, step.inbox, step.sent, step.volume) == ([2, 1], [2, 1], [2, 2], 4)
    assert [step.stages(rank) for rank in range(2)] == [[0], [1]]


def test_a_number_for_a_rank_is_divided_among_its_stages() -> None:
    index = simulate(parse_programs("F0.0 F1.0 S>1.0 R<1.0 B1.0 R1 B0.0 R0\nR>2.0 F2.0 B2.0 S<2.0 R2")).index
    assert of_stages(3.0, index, "forward") == [1.5, 1.5, 3.0]
    assert of_stages([1, 2, 3], index, "forward") == [1.0, 2.0, 3.0]
    assert {kind.__name__: times for kind, times in Costs(1.0, 4.0, 1.0).durations(index).items()} == {
        "Forward": [0.5, 0.5, 1.0], "Backward": [2.0, 2.0, 4.0], "WeightBackward": [0.5, 0.5, 1.0],
        "InputBackward": [1.5, 1.5, 3.0],
    }  # fmt: skip
    Costs(weight=2.0, overlap=0.0)
    Costs(forward=[0.0, 1.0], overlap=1.0)
    with pytest.raises(ValueError, match="costs: memory is .1.0, -0.5.; it must be 0 or more, and finite"):
        Costs(memory=[1.0, -0.5])
    with pytest.raises(ValueError, match=r"costs: overlap is -0.1; use a number from 0"):
        Costs(overlap=-0.1)
    assert Costs.parse("b=1,w=1") == Costs(1.0, 1.0, 1.0)


def test_invalid_programs_are_refused_with_the_first_five_problems() -> None:
    with pytest.raises(BuildError) as error:
        simulate(parse_programs(" ".join(f"F0.{number}" for number in range(7))))
    assert str(error.value).startswith("pipeline: invalid programs: ")
    assert str(error.value).count(";") == 4


def test_orders_are_built_by_stage_and_not_beyond_the_last_microbatch() -> None:
    steps = OrderBuilder(2)
    for stage in (3, 5):
        steps.input_backward(stage)
        steps.input_backward(stage)
    assert steps.open == 4
    steps.weight_backward_of(5)
    steps.weight_backward()
    assert (steps.open, steps.count(WeightBackward, 3), steps.count(WeightBackward, 5)) == (2, 1, 1)
    steps.weight_backward_of(5)
    steps.weight_backward()
    steps.weight_backward()
    steps.overlap(1, 2)
    steps.backward(2)
    steps.both_halves(2)
    steps.forward(1)
    steps.forward(1)
    assert steps.count(InputBackward, 2) == steps.count(WeightBackward, 2) == 3
    assert " ".join(map(str, steps.actions)) == ("I3.0 I3.1 I5.0 I5.1 W5.0 W3.0 W5.1 W3.1 F1.0+B2.0 B2.1 F1.1")
