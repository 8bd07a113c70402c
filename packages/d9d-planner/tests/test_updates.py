"""Costs of optimizer updates: of all parameters alike, and of each weight."""

from __future__ import annotations

from typing import Any

import pytest
from d9d_core.cost import BlockCost, OpCost, OptimizerCost, Weight
from d9d_planner.costs.update import Update, Updates, uneven_shards


def block(*weights: Weight, **given: Any) -> BlockCost:
    """Block with these weights in one op."""
    return BlockCost("block", (OpCost("op", "product", weights=weights),), **given)


WEIGHT = Weight("w", (10, 4))
BANK = Weight("bank", (8, 3, 2), "bank")


def test_the_first_rank_has_the_most_rows_of_a_weight() -> None:
    assert uneven_shards(block(WEIGHT, parameters=40), 4) == (12, 12)
    assert uneven_shards(block(WEIGHT, parameters=48), 4) == (14, 14)  # 8 parameters that no op names
    assert uneven_shards(block(WEIGHT, Weight("f", (6, 2), trains=False), parameters=52, frozen=12), 4) == (16, 12)
    assert uneven_shards(block(WEIGHT, parameters=20), 4) == (5, 5)  # a tied weight is counted elsewhere
    assert uneven_shards(block(WEIGHT, BANK, parameters=40, expert_parameters=48), 4) == (12, 12)
    assert uneven_shards(block(WEIGHT, parameters=40, frozen=44), 1) == (40, 40)


def test_equal_costs_of_all_parameters_are_counted_on_the_rank_with_the_most() -> None:
    cost = OptimizerCost(state=8.0, traffic=16.0, workspace=2.0, flops=3.0)
    updates = Updates(cost, shards=4, expert_shards=2, tensor=1)
    blocks = [
        block(WEIGHT, BANK, parameters=40, expert_parameters=58, frozen_experts=10, count=3), block(parameters=8),
    ]  # fmt: skip
    number = 3 * (12 + 24) + 2
    assert updates.of(blocks) == Update(8.0 * number, 16.0 * number, 2.0 * number, 3.0 * number)


def test_temporary_bytes_of_one_weight_are_those_of_the_largest_trained_shard() -> None:
    cost = OptimizerCost(state=1.0, traffic=1.0, workspace_of_one=6.0)
    large = Weight("large", (100, 4), trains=False)
    updates = Updates(cost, shards=4, expert_shards=2, tensor=1)
    assert updates.of([block(large, WEIGHT, BANK)]).workspace == 6.0 * 48 / 2
    assert updates.of([block(large, WEIGHT)]).workspace == 6.0 * 40 / 4
    assert updates.of([block(large)]).workspace == 0.0


def updated(
    weight: Weight, shards: int = 1, expert_shards: int = 1, tensor: int = 1, **given: Any
) -> tuple[Update, list[tuple[str, tuple[int, ...]]]]:
    """Update of a block with an optimizer of matrices, and the weights that were asked for."""
    asked: list[tuple[str, tuple[int, ...]]] = []
    matrix = OptimizerCost(state=4.0, traffic=8.0, workspace=1.0, workspace_of_one=2.0, flops=5.0, exchanged=3.0)

    def of_weight(name: str, shape: tuple[int, ...]) -> OptimizerCost:
        asked.append((name, shape))
        return matrix

    cost = OptimizerCost(state=100.0, traffic=200.0, of_weight=of_weight)
    return Updates(cost, shards, expert_shards, tensor).of([block(weight, **given)]), asked


def test_each_weight_is_named_with_its_whole_shape_and_the_rest_costs_as_usual() -> None:
    found, asked = updated(Weight("w", (10, 4), cut=0), tensor=2, parameters=42)
    assert asked == [("w", (20, 4))]
    # Two ranks of tp share the matrix: one sends its half, and each updates some of the matrices.
    rest = Update(200.0, 400.0)
    own = Update(160.0, 320.0, 40.0, 200.0, 120.0)
    assert found == own + rest + Update(workspace=80.0)
    _, asked = updated(WEIGHT, parameters=80, names=("a.0", "a.1"), count=2)
    assert asked == [("a.0.w", (10, 4)), ("a.1.w", (10, 4))]


def test_sharded_matrices_are_updated_as_a_whole_by_some_rank() -> None:
    found, _ = updated(WEIGHT, shards=4, parameters=40)
    assert found == Update(40.0, 80.0, 10.0 + 20.0, 50.0, 30.0)
    both, _ = updated(Weight("w", (10, 4), cut=1), shards=4, tensor=2, parameters=40)
    assert both == Update(40.0, 80.0, 10.0 + 20.0, 50.0 * 8, 40 * 2 * 3.0)
    both, _ = updated(Weight("w", (10, 4), cut=1), shards=2, tensor=2, parameters=40)
    assert (both.flops, both.exchanged) == (20 * 5.0 * 4, 40 * 2 * 3.0)
    alone, _ = updated(WEIGHT, parameters=40)
    assert alone.exchanged == 0.0


def test_banks_are_sharded_between_their_matrices_and_sent_nowhere() -> None:
    found, _ = updated(BANK, shards=16, expert_shards=4, expert_parameters=48)
    assert found == Update(48.0, 96.0, 12.0 + 24.0, 60.0, 0.0)


@pytest.mark.parametrize("weight", [WEIGHT, BANK])
def test_a_weight_that_is_counted_elsewhere_costs_nothing(weight: Weight) -> None:
    found, asked = updated(weight)
    assert (found, asked) == (Update(), [])
