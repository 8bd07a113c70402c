"""Counts of a routing, and experts that take no more than their share."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from d9d_core.errors import BuildError
from d9d_moe.router.routing import TopKRouting, count_rows
from d9d_moe.router.selection import over_capacity
from d9d_moe.router.top_k import TopKRouter
from d9d_testing.tolerances import assert_close_values
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

HIDDEN, EXPERTS, TOP_K = 8, 6, 2


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def router(**options: Any) -> TopKRouter:
    made = TopKRouter(HIDDEN, EXPERTS, TOP_K, std=0.3, **options)
    with torch.no_grad():
        made.weight.copy_(0.5 * normal(EXPERTS, HIDDEN, seed=1))
    return made


def late_by_hand(indices: list[list[int]], limit: int) -> list[list[bool]]:
    """First choices first, each expert's rows counted one after the other."""
    rows: dict[int, int] = {}
    late = [[False] * len(chosen) for chosen in indices]
    for place in range(len(indices[0]) if indices else 0):
        for token, chosen in enumerate(indices):
            late[token][place] = rows.get(chosen[place], 0) >= limit
            rows[chosen[place]] = rows.get(chosen[place], 0) + 1
    return late


def test_a_routing_is_incomplete_where_rows_may_have_no_expert() -> None:
    tokens, padding = normal(6, HIDDEN), torch.arange(6) == 5
    assert not router()(tokens).incomplete
    assert router()(tokens, padding=padding).incomplete
    assert router(capacity=1.0)(tokens).incomplete
    indices, weights = torch.zeros(6, 1, dtype=torch.int64), torch.ones(6, 1)
    assert not TopKRouting.of(indices, weights, EXPERTS).incomplete
    assert TopKRouting.of(indices, weights, EXPERTS, limit=3).incomplete


@given(
    indices=st.lists(st.lists(st.integers(0, 4), min_size=3, max_size=3), max_size=12),
    limit=st.integers(0, 6),
)
@settings(max_examples=100)
def test_first_choices_come_first_then_earlier_tokens(indices: list[list[int]], limit: int) -> None:
    found = over_capacity(torch.tensor(indices, dtype=torch.int64).view(-1, 3), limit)
    assert found.tolist() == late_by_hand(indices, limit)


@given(indices=st.lists(st.lists(st.integers(0, 5), min_size=2, max_size=2), max_size=12))
@settings(max_examples=50)
def test_counts_are_rows_by_expert_and_leave_nobodys_out(indices: list[list[int]]) -> None:
    counts = count_rows(torch.tensor(indices, dtype=torch.int64).view(-1, 2), 5)
    assert counts.tolist() == [sum(chosen.count(expert) for chosen in indices) for expert in range(5)]


@pytest.mark.parametrize("capacity", [0.2, 0.75, 1.0, 1.3])
@pytest.mark.parametrize("renormalise", [True, False])
def test_full_experts_drop_what_comes_late(capacity: float, renormalise: bool) -> None:
    tokens = normal(21, HIDDEN) + 0.5
    free, limited = (router(capacity=c, renormalise=renormalise)(tokens) for c in (None, capacity))
    assert limited.limit == math.ceil(capacity * 21 * TOP_K / EXPERTS)
    late = torch.tensor(late_by_hand(free.indices.tolist(), limited.limit))
    assert late.any()
    assert not late.all()
    assert torch.equal(limited.indices, free.indices.masked_fill(late, EXPERTS))
    assert torch.equal(limited.weights, free.weights.masked_fill(late, 0))  # not renormalised to the remaining weights
    assert torch.equal(limited.counts, count_rows(limited.indices, EXPERTS))
    assert limited.counts.max() == limited.limit
    assert free.limit is None


def test_dropped_rows_are_counted() -> None:
    made, tokens = router(capacity=0.5), normal(21, HIDDEN)
    routing, tallies = made(tokens), made.tallies()
    # What was asked for, so that a bias follows the demand and not what full experts let through.
    assert torch.equal(tallies["expert_tokens"], router()(tokens).counts)
    assert tallies["dropped"] == (routing.indices == EXPERTS).sum() > 0
    assert tallies["expert_tokens"].sum() == 21 * TOP_K


def test_a_dropped_row_teaches_nothing() -> None:
    made = router(capacity=0.5, renormalise=False)
    tokens = normal(21, HIDDEN).requires_grad_()
    routing = made(tokens)
    routing.weights.sum().backward()
    gone = (routing.indices == EXPERTS).all(1)
    assert gone.any()
    assert not tokens.grad[gone].any()
    assert tokens.grad[~gone].any(1).all()


def test_no_token_fits_in() -> None:
    routing = router(capacity=1.0)(torch.zeros(0, HIDDEN))
    assert routing.limit == 0
    assert routing.counts.tolist() == [0] * EXPERTS


@pytest.mark.thorough
@pytest.mark.filterwarnings("default:.*should not be instantiated:DeprecationWarning")  # Dynamo's own, in torch 2.11
def test_it_compiles_whole_for_several_lengths() -> None:
    plain, compiled = router(capacity=0.7), torch.compile(router(capacity=0.7), backend="aot_eager", fullgraph=True)
    for tokens in (12, 20, 32):
        expected, actual = plain(normal(tokens, HIDDEN), samples=4), compiled(normal(tokens, HIDDEN), samples=4)
        assert torch.equal(actual.indices, expected.indices)
        assert_close_values(actual.weights, expected.weights)
        assert actual.limit == expected.limit
        assert torch.equal(actual.counts, expected.counts)


def test_a_choice_made_by_hand_has_its_counts() -> None:
    made = TopKRouting.of(torch.tensor([[0, 2], [2, 3]]), torch.ones(2, 2), experts=3)
    assert made.counts.tolist() == [1, 0, 2]
    assert made.scores.shape == (2, 3)
    assert made.limit is None


@pytest.mark.parametrize("capacity", [0.0, -1.0, math.inf, math.nan])
def test_a_capacity_that_is_none_is_refused(capacity: float) -> None:
    with pytest.raises(BuildError, match="choose a number above zero"):
        router(capacity=capacity)
