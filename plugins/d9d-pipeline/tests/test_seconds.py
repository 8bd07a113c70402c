"""Seconds for planners equal the simulator's."""

from __future__ import annotations

from d9d_core.cost import StageTimes
from d9d_pipeline.schedule.one_forward_one_backward import one_forward_one_backward
from d9d_pipeline.schedule.zero_bubble import zb1p
from d9d_pipeline.simulator.seconds import seconds


def test_a_step_of_1f1b_has_the_bubble_of_the_formula() -> None:
    times = StageTimes([1.0] * 4, [2.0] * 4, [1.0] * 4)
    assert seconds(one_forward_one_backward(4, 8), times) == (8 + 3) * 3.0


def test_weight_gradients_fill_bubbles_only_where_they_take_time() -> None:
    whole, apart = (StageTimes([1.0] * 4, [2.0] * 4, [weight] * 4) for weight in (0.0, 1.0))
    assert seconds(zb1p(4, 8), apart) < seconds(zb1p(4, 8), whole)


def test_slow_transfers_make_a_step_longer() -> None:
    fast, slow = (StageTimes([1.0] * 2, [2.0] * 2, [1.0] * 2, transfer) for transfer in (0.0, 0.5))
    assert seconds(one_forward_one_backward(2, 4), fast) < seconds(one_forward_one_backward(2, 4), slow)
