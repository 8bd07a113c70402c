"""Costs of mixtures of experts, computed by hand for small sizes whose factors all differ."""

from __future__ import annotations

import pytest
from d9d_core.cost import Exchange, OpCost, Share, Weight
from d9d_core.errors import BuildError
from d9d_moe import costs

WEIGHTS = (Weight("experts.gate_proj", (3, 5, 7), "bank"),)


def test_a_router_multiplies_rows_by_weights_and_reads_float32_scores_four_times() -> None:
    # 5 rows of 7 features, 3 experts: 5 * 7 * 3 = 105 multiply-adds; 5 * 3 = 15 scores of 4 bytes.
    assert costs.router(5, 7, 3, 2, weights=WEIGHTS) == (
        OpCost("router", "product", 210, 420, 70, 140, rows=5, weights=WEIGHTS),
        OpCost("choice of experts", "memory", traffic=240, backward_traffic=240, kept=120),
    )


@pytest.mark.parametrize(("compiled", "kept"), [(True, 2), (False, 4)])
def test_experts_are_three_products_whose_backward_computes_twice_as_much(compiled: bool, kept: int) -> None:
    product, gate = costs.grouped_swiglu(5, 7, 11, 3, 2, compiled=compiled, weights=WEIGHTS)
    # Each of 5 rows: 3 products of 7 * 11. Read and written are 3 * 7 + 3 * 11 = 54 numbers a row, and 3 banks of 3
    # experts of 7 * 11 numbers; the input, 5 * 7 numbers of 2 bytes, is kept.
    assert product == OpCost(
        "experts", "grouped_product", 2310, 4620, 2 * (270 + 693), 4 * (270 + 693), 70, rows=5, weights=WEIGHTS
    )
    assert (gate.name, gate.kept) == ("silu_mul", kept * 2 * 5 * 11)


def test_a_permutation_copies_tokens_to_rows_and_keeps_rows_and_two_indices_of_each() -> None:
    # 3 tokens and 5 rows of 7 features of 2 bytes: 42 and 70 bytes.
    assert costs.permutation(3, 5, 7, 2) == OpCost(
        "permutation", "memory", traffic=84 + 140, backward_traffic=84 + 350, kept=70 + 80
    )


def test_experts_of_one_rank_are_dispatched_to_nobody() -> None:
    assert costs.dispatch(6, 4, 2, 5, 1, 2) == costs.Dispatch((), (), (), 0.0)


@pytest.mark.parametrize(("width", "wide"), [(2, 4), (8, 8)])
def test_a_dispatch_sends_a_token_once_to_each_rank_of_its_experts(width: int, wide: int) -> None:
    # Of the 6 pairs of 4 experts, one is on the other of two ranks alone: a token goes to 2 * 5 / 6 ranks, 6 tokens to
    # 10. Tokens have 5 features.
    found = costs.dispatch(6, 4, 2, 5, 2, width)
    token, sent = 30 * width, 50 * width
    counts = Exchange("all_to_all", "ep", 8 * (2 + 4))
    rows = Exchange("all_to_all", "ep", pytest.approx(sent))
    labels = Exchange("all_to_all", "ep", pytest.approx(10 * 2 * 2 * wide))
    weights = Exchange("all_to_all", "ep", pytest.approx(10 * 2 * wide))
    assert found.exchanges == (counts, rows, labels, rows)
    assert found.backward_exchanges == (rows, rows, weights)
    assert found.workspace == pytest.approx(2 * token + sent)
    (copies,) = found.ops
    moved = 2 * (token + sent) + 2 * (sent - token)
    assert (copies.name, copies.kind) == ("sent tokens", "memory")
    # Room for two rows of each token is written, although fewer of them are sent.
    assert copies.traffic == pytest.approx(moved + 2 * token - sent)
    assert copies.backward_traffic == pytest.approx(moved)


def test_no_more_rows_leave_than_a_token_has_experts() -> None:
    # 4 ranks of one expert each: of the 4 choices of one expert, 3 are elsewhere, so each token goes to one rank.
    found = costs.dispatch(6, 4, 1, 5, 4, 2)
    assert found.exchanges[0].size == 8 * (4 + 4)
    assert found.exchanges[1].size == pytest.approx(60)
    assert found.workspace == pytest.approx(60 + 60)


@pytest.mark.parametrize("compiled", [True, False])
def test_a_layer_of_experts_has_the_costs_of_its_ranks_positions_and_experts(compiled: bool) -> None:
    # 2 samples of 12 positions, of which cp halves each sample and tp takes a third: 4 tokens, and 8 rows.
    share = Share(samples=2, length=12, tensor=3, context=2, experts=2, width=2, compiled=compiled)
    found = costs.mixture(share, hidden=5, inside=7, experts=6, per_token=2)
    sent = costs.dispatch(4, 6, 2, 5, 2, 2)
    banks = (
        Weight("ffn.experts.gate_proj", (3, 5, 7), "bank"), Weight("ffn.experts.up_proj", (3, 5, 7), "bank"),
        Weight("ffn.experts.down_proj", (3, 7, 5), "bank"),
    )  # fmt: skip
    assert found.ops == (
        OpCost("ffn input", "memory", kept=40),
        *costs.router(4, 5, 6, 2, weights=(Weight("ffn.router.weight", (6, 5)),)),
        costs.permutation(4, 8, 5, 2),
        *costs.grouped_swiglu(8, 5, 7, 3, 2, compiled=compiled, weights=banks),
        *sent.ops,
    )
    assert (found.name, found.parameters, found.experts) == ("layer with experts", 5 * 6, 3 * 3 * 5 * 7)
    assert found.workspace == pytest.approx(2 * 2 * 8 * (5 + 7) + sent.workspace)
    assert (found.exchanges, found.backward_exchanges) == (sent.exchanges, sent.backward_exchanges)


def test_ranks_that_do_not_divide_the_experts_are_refused() -> None:
    with pytest.raises(BuildError) as caught:
        costs.mixture(Share(samples=1, length=4, experts=4), 5, 7, 6, 2)
    assert str(caught.value) == "mesh.ep is 4, which does not divide 6 experts; use a divisor"
