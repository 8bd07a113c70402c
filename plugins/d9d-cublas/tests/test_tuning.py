"""The choice among measured algorithms."""

from __future__ import annotations

import pytest
import torch
from d9d_cublas.binding import LibraryError
from d9d_cublas.tuning import ROUNDS, Run, Tuner, _counts, decide, is_right


def test_a_gain_within_the_noise_keeps_the_default() -> None:
    assert decide([[1.0, 1.0, 1.0], [0.985, 0.985, 0.985]]) == 0


def test_a_clear_gain_is_taken_and_the_largest_of_several() -> None:
    assert decide([[1.0, 1.0, 1.0], [0.97, 0.97, 0.97], [0.94, 0.95, 0.96]]) == 2


def test_rounds_that_disagree_keep_the_default() -> None:
    assert decide([[1.0, 1.0, 1.0], [0.9, 0.9, 1.01]]) == 0


def test_the_largest_gain_is_passed_over_where_its_rounds_disagree() -> None:
    assert decide([[1.0, 1.0, 1.0], [0.9, 0.9, 1.01], [0.97, 0.97, 0.97]]) == 2


class Script:
    """Clock that says what each run took, one after the other, and keeps what was asked."""

    def __init__(self, times: dict[str, list[float]]) -> None:
        self.times = {name: list(values) for name, values in times.items()}
        self.asked: list[list[str]] = []
        self.counts: list[list[int]] = []

    def run(self, name: str) -> Run:
        def run() -> None:
            raise AssertionError("a clock of scripts runs nothing")

        run.__name__ = name
        return run

    def __call__(self, runs: list[Run], repetitions: list[int]) -> list[float]:
        self.asked.append([run.__name__ for run in runs])
        self.counts.append(list(repetitions))
        return [self.times[run.__name__].pop(0) for run in runs]

    def choose(self) -> int | None:
        default, *candidates = (self.run(name) for name in self.times)
        return Tuner(self).choose(default, candidates)[0]


def test_what_is_far_slower_in_the_first_pass_is_not_measured_again() -> None:
    clock = Script({"default": [9, 1, 1, 1, *[1.0] * 4], "slow": [1.2], "fast": [1.05, 0.9, 0.9, 0.9]})
    assert clock.choose() == 1
    assert "slow" not in clock.asked[-1]


def test_without_a_candidate_that_is_left_the_default_is_taken_without_rounds() -> None:
    clock = Script({"default": [9, 1, 1, 1], "slow": [1.2]})
    assert clock.choose() is None
    assert len(clock.asked) == 2


def test_rounds_follow_each_other_without_a_pause_and_change_their_order() -> None:
    clock = Script({"default": [9, 1, 1, 1, *[1.0] * 4], "a": [1.0] * 4, "b": [1.0] * 4})
    assert clock.choose() is None
    _, first, rounds = clock.asked
    assert first == ["default", "default", "a", "b"]
    assert rounds[0] == "default"  # after a pause, and not counted
    orders = [tuple(rounds[1 + 3 * number : 4 + 3 * number]) for number in range(ROUNDS)]
    assert {frozenset(order) for order in orders} == {frozenset({"default", "a", "b"})}
    assert len(set(orders)) == ROUNDS


@pytest.mark.parametrize("once", [0.03, 0.6, 5.0])
def test_a_product_is_measured_within_a_second_whatever_it_takes(once: float) -> None:
    names = [f"candidate {number}" for number in range(8)]
    clock = Script({"default": [once] * 8, **{name: [once] * 4 for name in names}})
    assert clock.choose() is None
    milliseconds = once * sum(count for counts in clock.counts for count in counts)
    assert 300 < milliseconds < 1000


def test_a_result_that_is_wrong_missing_or_refused_is_noticed() -> None:
    expected = torch.randn(4, 8)
    out = torch.empty_like(expected)

    def refuse() -> None:
        raise LibraryError("not supported")

    assert is_right(lambda: out.copy_(expected * 1.001), out, expected)
    assert not is_right(lambda: out.copy_(expected * 1.02), out, expected)
    assert not is_right(lambda: out[1:].copy_(expected[1:]), out, expected)
    assert not is_right(refuse, out, expected)


def test_a_gain_of_two_percent_is_enough() -> None:
    assert decide([[1.0, 1.0, 1.0], [0.98, 0.98, 0.98]]) == 1
    assert decide([[1.0, 1.0, 1.0], [0.9, 0.9, 1.0]]) == 0  # not faster in each round


def test_candidates_are_measured_as_often_as_their_time_allows_in_three_orders() -> None:
    times = {"default": [9, 0.5, 0.25, 1.0, 9, 1.0, 1.25, 1.5], "a": [1.1, 0.8, 0.75, 0.7], "b": [1.0, 1.0, 1.0, 1.0]}
    clock = Script(times)
    default, *candidates = (clock.run(name) for name in times)
    assert Tuner(clock).choose(default, candidates) == (0, (1.25, 0.75))
    assert clock.asked == [
        ["default", "default"],
        ["default", "default", "a", "b"],
        ["default", *["default", "a", "b"], *["b", "a", "default"], *["a", "b", "default"]],
    ]
    # Of 0.5 ms each: 300 ms to warm up, 5 ms of each; then, of 0.25 ms when warm, 10 ms of each.
    assert clock.counts == [[1, 1], [600, 10, 10, 10], [40] * 10]


def test_a_time_of_zero_is_taken_as_a_microsecond_and_a_long_one_runs_once() -> None:
    assert _counts([300.0, 5.0], 0.0) == [300_000, 5000]
    assert _counts([300.0, 5.0], 100.0) == [3, 1]
