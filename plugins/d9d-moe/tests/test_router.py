"""The router against the published ones, and what its choice rests on."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from d9d_core.errors import BuildError
from d9d_moe.router.logits import bfloat16_logits
from d9d_moe.router.selection import best, keep_best_groups
from d9d_moe.router.top_k import TopKRouter
from d9d_testing.tolerances import assert_close_gradients, assert_close_values
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

TOKENS, HIDDEN, EXPERTS = 40, 32, 16
#: Few, so that many are equal.
NUMBERS = st.sampled_from([-math.inf, -2.0, -1e-45, -0.0, 0.0, 0.25, 3.0, math.inf, math.nan])


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def router(top_k: int = 4, hidden: int = HIDDEN, experts: int = EXPERTS, **options: Any) -> TopKRouter:
    made = TopKRouter(hidden, experts, top_k, std=0.3, **options)
    with torch.no_grad():
        made.weight.copy_(0.3 * normal(experts, hidden, seed=1))
    return made


def by_scores(*scores: float, **options: Any) -> tuple[TopKRouter, Tensor]:
    """A router of one feature and a token for which it has these logits."""
    made = router(hidden=1, experts=len(scores), **options)
    with torch.no_grad():
        made.weight.copy_(torch.tensor(scores).unsqueeze(1))
    return made, torch.ones(1, 1)


def compare(ours: TopKRouter, theirs: Any) -> None:
    """Indices and weights per expert, and the gradients of both inputs through the weights."""
    found = []
    for module in (ours, theirs):
        tokens = normal(TOKENS, HIDDEN).requires_grad_()
        result = module(tokens)
        weights, indices = (result.weights, result.indices) if module is ours else result[1:]
        spread = torch.zeros(TOKENS, EXPERTS).scatter(1, indices, weights)  # independent of the order within k
        (spread * normal(TOKENS, EXPERTS, seed=2)).sum().backward()
        found.append({"weights": spread.detach(), "tokens": tokens.grad, "weight": module.weight.grad})
    assert torch.equal(found[0]["weights"] > 0, found[1]["weights"] > 0)
    assert_close_values(found[0]["weights"], found[1]["weights"])
    assert_close_gradients(*found)


@pytest.mark.thorough
@pytest.mark.parametrize("renormalise", [True, False])
def test_softmax_routing_is_that_of_qwen3_moe(renormalise: bool) -> None:
    pytest.importorskip("transformers")
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeTopKRouter

    config = Qwen3MoeConfig(hidden_size=HIDDEN, num_experts=EXPERTS, num_experts_per_tok=4, norm_topk_prob=renormalise)
    ours, theirs = router(renormalise=renormalise), Qwen3MoeTopKRouter(config)
    theirs.load_state_dict(ours.state_dict())
    compare(ours, theirs)


@pytest.mark.parametrize(("groups", "top_groups", "renormalise"), [(4, 2, True), (8, 3, False), (1, 1, True)])
def test_grouped_sigmoid_routing_is_that_of_deepseek_v3(groups: int, top_groups: int, renormalise: bool) -> None:
    pytest.importorskip("transformers")
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Config, DeepseekV3TopkRouter

    config = DeepseekV3Config(
        hidden_size=HIDDEN,
        num_local_experts=EXPERTS,
        num_experts_per_tok=4,
        n_group=groups,
        topk_group=top_groups,
        norm_topk_prob=renormalise,
        routed_scaling_factor=2.5,
    )
    ours = router(
        scoring="sigmoid",
        groups=groups,
        top_groups=top_groups,
        renormalise=renormalise,
        scale=2.5,
        selection_bias=True,
    )
    ours.selection_bias.copy_(0.2 * normal(EXPERTS, seed=3))
    theirs = DeepseekV3TopkRouter(config)
    theirs.load_state_dict({"weight": ours.weight, "e_score_correction_bias": ours.selection_bias})
    compare(ours, theirs)


def test_of_equal_scores_the_lower_expert_wins() -> None:
    made, token = by_scores(1.0, 2.0, 2.0, 1.0, 2.0, 1.0, top_k=4)
    assert made(token).indices.tolist() == [[1, 2, 4, 0]]
    assert best(torch.zeros(3, 1000), 5).tolist() == [list(range(5))] * 3


@given(scores=st.lists(st.lists(NUMBERS, min_size=7, max_size=7), min_size=1, max_size=3), count=st.integers(1, 7))
def test_the_best_are_those_of_a_stable_sort_whatever_the_scores(scores: list[list[float]], count: int) -> None:
    drawn = torch.tensor(scores)
    expected = torch.sort(drawn, dim=-1, descending=True, stable=True).indices[:, :count]
    assert torch.equal(best(drawn, count), expected)
    assert torch.equal(best(drawn.double(), count), expected)


def test_of_equal_groups_the_lower_one_wins() -> None:
    kept = keep_best_groups(torch.zeros(1, 6), groups=3, count=2)
    assert kept.isfinite().tolist() == [[True, True, True, True, False, False]]


def test_a_group_counts_by_its_two_best_experts() -> None:
    made, token = by_scores(3.0, -9.0, -9.0, 1.9, 1.8, -9.0, scoring="sigmoid", groups=2, top_groups=1, top_k=2)
    assert made(token).indices.tolist() == [[3, 4]]


def test_groups_of_one_expert_are_that_expert() -> None:
    made, token = by_scores(0.1, 0.3, 0.2, groups=3, top_groups=2, top_k=2)
    assert made(token).indices.tolist() == [[1, 2]]


def test_no_token_is_routed_to_no_expert() -> None:
    routing = router(groups=4, top_groups=2)(torch.zeros(0, HIDDEN))
    assert routing.indices.shape == routing.weights.shape == (0, 4)
    assert routing.scores.shape == (0, EXPERTS)


def test_the_bias_changes_who_is_picked_and_not_the_weights() -> None:
    made, token = by_scores(1.0, 0.5, 0.0, top_k=1, scoring="sigmoid", renormalise=False, selection_bias=True)
    made.selection_bias.copy_(torch.tensor([0.0, 0.0, 5.0]))
    routing = made(token)
    assert routing.indices.tolist() == [[2]]
    assert routing.weights.item() == 0.5
    assert torch.equal(routing.scores, torch.tensor([[1.0, 0.5, 0.0]]).sigmoid())


@pytest.mark.parametrize("selection_bias", [True, False])
def test_the_bias_is_in_the_state_if_there_is_one(selection_bias: bool) -> None:
    assert ("selection_bias" in router(selection_bias=selection_bias).state_dict()) == selection_bias


@pytest.mark.parametrize("autocast", [True, False])
def test_scores_are_computed_in_float32(autocast: bool) -> None:
    made, tokens = router(), normal(TOKENS, HIDDEN)
    if not autocast:
        made, tokens = made.bfloat16(), tokens.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        routing = made(tokens)
    exact = router().double()
    with torch.no_grad():
        exact.weight.copy_(made.weight)
    assert routing.weights.dtype == routing.scores.dtype == torch.float32
    assert_close_values(routing.scores, exact(tokens.double()).scores.float())


def test_weights_whose_scores_all_underflow_are_zeros() -> None:
    made, token = by_scores(-200.0, -200.0, top_k=2, scoring="sigmoid")
    weights = made(token).weights
    weights.sum().backward()
    assert weights.tolist() == [[0.0, 0.0]]
    assert made.weight.grad.isfinite().all()


def test_a_router_from_the_meta_device_is_filled_late() -> None:
    with torch.device("meta"):
        made = TopKRouter(HIDDEN, 512, 4, std=0.5, selection_bias=True)
    made.to_empty(device="cpu")
    torch.manual_seed(0)
    made.reset_parameters()
    assert abs(made.weight.std().item() - 0.5) < 0.02
    assert not made.selection_bias.any()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"top_k": 17}, "top_k is 17; with 16 experts choose 1 to 16"),
        ({"top_k": 0}, "top_k is 0"),
        ({"groups": 3, "top_groups": 1}, "groups is 3, which does not divide the 16 experts"),
        ({"groups": 4}, "set top_groups"),
        ({"groups": 4, "top_groups": 5}, "top_groups is 5; with 4 groups choose 1 to 4"),
        ({"groups": 8, "top_groups": 1}, "1 of 8 groups hold 2 experts"),
        ({"scoring": "relu"}, "choose softmax or sigmoid"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(BuildError, match=why):
        router(**options)


@pytest.mark.parametrize("tokens", [0, 1, TOKENS])
def test_logits_of_bfloat16_are_exact_to_float32_and_their_gradients_round_once(tokens: int) -> None:
    rows, weight = normal(tokens, HIDDEN).bfloat16(), normal(EXPERTS, HIDDEN, seed=1).bfloat16()
    grad = normal(tokens, EXPERTS, seed=2)
    inputs, exact = (
        [t.to(dtype, copy=True).requires_grad_() for t in (rows, weight)] for dtype in (torch.bfloat16, torch.float64)
    )
    logits, wanted = bfloat16_logits(*inputs), functional.linear(*exact)
    assert logits.dtype == torch.float32
    assert_close_values(logits, wanted.float())
    logits.backward(grad)
    wanted.backward(grad.double())
    for found, right in zip(inputs, exact, strict=True):
        assert found.grad is not None
        assert right.grad is not None
        # Half a unit of the last of seven bits, and a little for sums in float32.
        torch.testing.assert_close(found.grad.double(), right.grad, rtol=2**-8 * 1.01, atol=1e-4)
