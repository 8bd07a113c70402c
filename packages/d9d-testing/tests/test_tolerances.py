from __future__ import annotations

import math

import pytest
import torch
from d9d_testing.tolerances import (
    TOLERANCES,
    Tolerance,
    assert_close_gradients,
    assert_close_values,
    compare_directions,
    tolerance,
)

LIMIT = Tolerance(rtol=0, atol=0, angle=1e-3, norm=1e-3)
EAST, NORTH = torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 5.0]])


def test_directions_are_compared_by_angle_and_length() -> None:
    assert compare_directions(EAST, NORTH) == (1.0, 0.4)
    assert compare_directions(-EAST, EAST) == (2.0, 0.0)
    angle, length = compare_directions(torch.tensor([math.cos(1e-3), math.sin(1e-3)]), torch.tensor([1.0, 0.0]))
    assert angle == pytest.approx(5e-7, rel=1e-3)
    assert length < 1e-7


def test_one_wrong_row_hides_in_a_tensor_and_shows_among_rows() -> None:
    expected = torch.ones(1000, 2)
    actual = expected.clone()
    actual[7] = torch.tensor([1.0, -1.0])
    assert_close_gradients({"w": actual}, {"w": expected}, within=Tolerance(0, 0, angle=1e-2, norm=1e-2))
    with pytest.raises(AssertionError, match="w: 1-cos 1"):
        assert_close_gradients({"w": actual}, {"w": expected}, within=LIMIT, by="row")


@pytest.mark.parametrize("wrong", [NORTH, 2 * EAST, torch.full((1, 2), math.nan), torch.zeros(1, 2)])
def test_wrong_gradients_are_named(wrong: torch.Tensor) -> None:
    with pytest.raises(AssertionError, match="1 of 2 gradients differ, worst first:\n  bad: "):
        assert_close_gradients({"bad": wrong, "good": EAST}, {"bad": EAST, "good": EAST}, within=LIMIT)


def test_zero_is_only_close_to_zero() -> None:
    zero = torch.zeros(1, 2)
    assert_close_gradients({"w": zero}, {"w": zero})
    with pytest.raises(AssertionError):
        assert_close_gradients({"w": 1e-20 * EAST}, {"w": zero}, within=LIMIT)


def test_missing_and_surplus_gradients_are_named() -> None:
    with pytest.raises(AssertionError, match="no gradient for"):
        assert_close_gradients({}, {"w": EAST})
    with pytest.raises(AssertionError, match="unexpected gradients for"):
        assert_close_gradients({"w": EAST}, {})
    with pytest.raises(AssertionError, match="w: shape"):
        assert_close_gradients({"w": EAST}, {"w": EAST.T})


def test_values_are_compared_as_the_coarser_dtype_allows() -> None:
    exact = torch.linspace(1, 2, 50)
    assert tolerance(exact, exact.bfloat16()) == TOLERANCES[torch.bfloat16]
    assert_close_values(exact.bfloat16(), exact)
    with pytest.raises(AssertionError, match="logits: "):
        assert_close_values(exact * 1.001, exact, what="logits")
    with pytest.raises(AssertionError):
        assert_close_values(torch.tensor([math.nan]), torch.tensor([math.nan]))
