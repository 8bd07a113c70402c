"""Loss terms and bias of a router against their formulas, and how they act in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from d9d_core.config import Section
from d9d_core.errors import BuildError
from d9d_core.traits import Adapts, AddsLosses, HasTallies, LossTerm
from d9d_moe.balancing.balancers import BatchBalance, SequenceBalance, SignUpdate, ZLoss, build_balancers
from d9d_moe.balancing.base import Balancer, BalancingLoss, Choice
from d9d_moe.balancing.config import Balancing
from d9d_moe.router.top_k import TopKRouter
from d9d_testing.tolerances import assert_close_gradients, assert_close_values
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

HIDDEN, EXPERTS, TOP_K = 8, 6, 2
FINITE = torch.tensor(True)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def choice_of(logits: Tensor, top_k: int, samples: int, scoring: str = "softmax") -> Choice:
    scores = logits.softmax(1) if scoring == "softmax" else logits.sigmoid()
    return Choice(logits, scores, scores.detach().topk(top_k).indices, samples)


def router(*balancing: Balancer, **options: Any) -> TopKRouter:
    made = TopKRouter(HIDDEN, EXPERTS, TOP_K, std=0.3, balancing=balancing, **options)
    with torch.no_grad():
        made.weight.copy_(0.5 * normal(EXPERTS, HIDDEN, seed=1))
    return made


# --- formulas


def sequence_by_hand(scores: Tensor, indices: Tensor, samples: int) -> Tensor:
    """DeepSeek-V3, equations 17 to 20, one expert of one sample after the other; summed over samples."""
    experts, top_k = scores.shape[1], indices.shape[1]
    total = scores.new_zeros(())
    for s, chosen in zip(scores.chunk(samples), indices.chunk(samples), strict=True):
        for expert in range(experts):
            f = experts / (top_k * len(s)) * (chosen == expert).any(1).sum()
            total = total + f * (s[:, expert] / s.sum(1)).mean()
    return total


def batch_by_hand(scores: Tensor, indices: Tensor, _samples: int) -> Tensor:
    """Switch Transformers, equations 4 to 6, with a fraction of all choices; T times that."""
    experts, mean = scores.shape[1], (scores / scores.sum(1, keepdim=True)).mean(0)
    fractions = torch.stack([(indices == expert).double().mean() for expert in range(experts)])
    return len(scores) * experts * (fractions * mean).sum()


@pytest.mark.thorough
@given(
    samples=st.integers(1, 4),
    length=st.integers(1, 6),
    experts=st.integers(1, 7),
    top_k=st.integers(1, 7),
    scoring=st.sampled_from(["softmax", "sigmoid"]),
)
@settings(max_examples=60)
def test_balance_terms_are_their_formulas(samples: int, length: int, experts: int, top_k: int, scoring: str) -> None:
    for loss, by_hand in ((SequenceBalance(1.0), sequence_by_hand), (BatchBalance(1.0), batch_by_hand)):
        found = []
        for formula in (False, True):
            logits = normal(samples * length, experts, dtype=torch.float64).requires_grad_()
            choice = choice_of(logits, min(top_k, experts), samples, scoring)
            total = by_hand(choice.scores, choice.indices, samples) if formula else loss.total(choice)
            total.backward()
            found.append({"total": total.detach(), "logits": logits.grad})
        torch.testing.assert_close(found[0], found[1])


@pytest.mark.thorough
def test_the_batch_term_is_that_of_transformers_over_k() -> None:
    pytest.importorskip("transformers")
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    logits = normal(40, EXPERTS)
    theirs = load_balancing_loss_func((logits,), num_experts=EXPERTS, top_k=TOP_K)
    ours = BatchBalance(1.0).total(choice_of(logits, TOP_K, 4)) / 40
    assert_close_values(TOP_K * ours, theirs)


@pytest.mark.parametrize("loss", [SequenceBalance(1.0), BatchBalance(1.0)])
def test_balance_terms_are_one_in_balance_and_greatest_in_collapse(loss: BalancingLoss) -> None:
    even = torch.eye(EXPERTS).repeat(2, 1) * 1000  # two samples, each token for another expert
    assert loss.total(choice_of(even, 1, 2)) == (2 if loss.loss_term().per == "sample" else 2 * EXPERTS)
    same = torch.eye(EXPERTS)[:1].repeat(2 * EXPERTS, 1) * 1000
    assert loss.total(choice_of(same, 1, 2)) == EXPERTS * loss.total(choice_of(even, 1, 2))


def test_the_z_term_is_its_formula() -> None:
    logits = normal(20, EXPERTS, dtype=torch.float64).requires_grad_()
    total = ZLoss(1.0).total(choice_of(logits, TOP_K, 2))
    torch.testing.assert_close(total, logits.exp().sum(1).log().square().sum())
    total.backward()
    expected = 2 * logits.exp().sum(1, keepdim=True).log() * logits.softmax(1)
    torch.testing.assert_close(logits.grad, expected)


@pytest.mark.parametrize("loss", [SequenceBalance(1.0), BatchBalance(1.0), ZLoss(1.0)])
def test_what_claims_to_be_layout_invariant_is(loss: BalancingLoss) -> None:
    """Cut by samples, only batch-level balance gives another sum."""
    logits = normal(24, EXPERTS)
    whole = loss.total(choice_of(logits, TOP_K, 4))
    parts = sum(loss.total(choice_of(part, TOP_K, 2)) for part in logits.chunk(2))
    assert torch.allclose(whole, parts) == loss.layout_invariant


@pytest.mark.parametrize("samples", [0, 1, 3])
@pytest.mark.parametrize("loss", [SequenceBalance(1.0), BatchBalance(1.0), ZLoss(1.0)])
def test_no_token_adds_nothing(loss: BalancingLoss, samples: int) -> None:
    logits = torch.zeros(0, EXPERTS, requires_grad=True)
    total = loss.total(choice_of(logits, TOP_K, samples))
    total.backward()
    assert total == 0
    assert logits.grad.shape == (0, EXPERTS)


def test_scores_that_all_underflow_have_finite_gradients() -> None:
    logits = torch.full((3, EXPERTS), -200.0, requires_grad=True)
    SequenceBalance(1.0).total(choice_of(logits, TOP_K, 1, "sigmoid")).backward()
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("score", [0.0, 1e-30, 1e-21, 1e-10])
def test_shares_of_scores_that_underflow_are_no_more_than_one(score: float) -> None:
    scores = torch.full((2, EXPERTS), score)
    shares = Choice(scores, scores, torch.zeros(2, TOP_K, dtype=torch.int64), 1).shares()
    assert ((shares >= 0) & (shares <= 1)).all()


# --- in the router

LOSSES = (SequenceBalance(0.5), ZLoss(0.1))
FACTORS = {"router_balance": 0.5 / 3, "router_z": 0.1 / 15}


def with_losses(how: str, dtype: torch.dtype) -> Mapping[str, Tensor]:
    """The gradients of tokens and W; the terms are injected, or in the open."""
    made = router(*LOSSES)
    tokens = normal(15, HIDDEN, seed=2).to(dtype).requires_grad_()
    if how == "in the open":
        routing = router()(tokens.detach())
        logits = torch.nn.functional.linear(tokens.float(), made.weight)
        choice = Choice(logits, logits.softmax(1), routing.indices, 3)
        weights = choice.scores.gather(1, routing.indices)
        weights = weights / weights.sum(1, keepdim=True)
        loss = sum(FACTORS[x.term] * x.total(choice) for x in LOSSES)
    else:
        for term, factor in made.loss_factors().items():
            factor.fill_(FACTORS[term])
        call: Any = torch.compile(made, backend="aot_eager", fullgraph=True) if "compiled" in how else made
        if "checkpointed" in how:
            weights = checkpoint(lambda x: call(x, samples=3).weights, tokens, use_reentrant=False)
        else:
            with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in how):
                weights = call(tokens, samples=3).weights
        loss = 0
    (loss + (weights * normal(15, TOP_K, seed=3)).sum()).backward()
    return {"tokens": tokens.grad, "weight": made.weight.grad}


@pytest.mark.full
@pytest.mark.filterwarnings("default:.*should not be instantiated:DeprecationWarning")  # Dynamo's own, in torch 2.11
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("how", ["eager", "autocast", "checkpointed", "compiled", "compiled and checkpointed"])
def test_gradients_are_those_of_the_terms_in_the_open(how: str, dtype: torch.dtype) -> None:
    assert_close_gradients(with_losses(how, dtype), with_losses("in the open", dtype))


def test_each_forward_overwrites_its_sums_and_tallies() -> None:
    made = router(*LOSSES)
    made(normal(30, HIDDEN, seed=5), samples=2)
    for context in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        for module in (made, made.eval()):
            with context():
                routing = module(normal(12, HIDDEN), samples=2)
    scores = routing.scores
    choice = Choice(normal(12, HIDDEN) @ made.weight.T, scores, routing.indices, 2)
    assert_close_values(made.loss_sums()["router_balance"], SequenceBalance(1.0).total(choice))
    assert_close_values(made.loss_sums()["router_z"], ZLoss(1.0).total(choice))
    tallies = made.tallies()
    assert tallies["expert_tokens"].tolist() == routing.indices.flatten().bincount(minlength=EXPERTS).tolist()
    assert tallies["tokens"] == 12
    assert_close_values(tallies["entropy"], -(scores * scores.log()).sum())
    assert "dropped" not in tallies


def test_a_recomputed_forward_counts_nothing_twice() -> None:
    made, tokens = router(*LOSSES), normal(12, HIDDEN).requires_grad_()
    weights = checkpoint(lambda x: made(x).weights, tokens, use_reentrant=False)
    before = [t.clone() for t in (*made.tallies().values(), *made.loss_sums().values())]
    weights.sum().backward()
    assert all(map(torch.equal, before, (*made.tallies().values(), *made.loss_sums().values())))


def test_entropy_of_sigmoid_scores_is_that_of_their_shares() -> None:
    made = router(scoring="sigmoid")
    with torch.no_grad():
        made.weight.zero_()
    made(normal(10, HIDDEN))
    assert_close_values(made.tallies()["entropy"], 10 * torch.tensor(float(EXPERTS)).log())


def test_experts_below_the_mean_become_likelier() -> None:
    made = router(SignUpdate(0.25))
    counts = torch.tensor([1, 2, 3, 4, 3, 5])
    made.adapt({"expert_tokens": counts}, FINITE)
    assert made.selection_bias.tolist() == [0.25, 0.25, 0.0, -0.25, 0.0, -0.25]
    made.adapt({"expert_tokens": counts}, ~FINITE)
    assert made.selection_bias.tolist() == [0.25, 0.25, 0.0, -0.25, 0.0, -0.25]


def test_loads_that_float32_cannot_tell_apart_are_told_apart() -> None:
    counts = torch.full((EXPERTS,), 2**24)
    counts[0] += 1
    moved = SignUpdate(1.0).moved(torch.zeros(EXPERTS), counts)
    assert moved.tolist() == [-1.0] + [1.0] * (EXPERTS - 1)


def test_the_bias_balances_what_is_far_from_balanced() -> None:
    made, tokens = router(SignUpdate(0.01), scoring="sigmoid"), normal(300, HIDDEN) + 1

    def violation() -> float:
        counts = made(tokens).counts.float()
        return float(counts.max() / counts.mean() - 1)

    before = violation()
    for _ in range(150):
        made(tokens)
        made.adapt(made.tallies(), FINITE)
    assert before > 0.5
    assert violation() < 0.1


def test_a_router_without_a_bias_adapts_nothing() -> None:
    made = router(*LOSSES)
    made.adapt({"expert_tokens": torch.arange(EXPERTS)}, FINITE)
    assert made.selection_bias is None


def test_only_the_bias_is_saved() -> None:
    assert set(router(*LOSSES, SignUpdate(0.1), capacity=1.0).state_dict()) == {"weight", "selection_bias"}
    assert set(router(*LOSSES).state_dict()) == {"weight"}


def test_buffers_from_the_meta_device_are_filled_late() -> None:
    with torch.device("meta"):
        made = TopKRouter(HIDDEN, EXPERTS, TOP_K, std=0.3, balancing=(*LOSSES, SignUpdate(0.1)), capacity=1.0)
    made.to_empty(device="cpu")
    for buffer in made.buffers():
        buffer.fill_(7)
    made.reset_parameters()
    assert len(list(made.buffers())) == 2 * len(LOSSES) + 4 + 1
    assert not any(buffer.any() for buffer in made.buffers())


def test_buffers_stay_wide_in_a_narrow_model() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        made = router(*LOSSES, SignUpdate(0.1))
    finally:
        torch.set_default_dtype(before)
    assert made.weight.dtype == torch.bfloat16
    assert {buffer.dtype for buffer in made.buffers()} == {torch.float32, torch.int64}


@pytest.mark.smoke
def test_nothing_is_read_on_the_host() -> None:
    with torch.device("meta"):
        made = TopKRouter(HIDDEN, EXPERTS, TOP_K, std=0.3, balancing=(*LOSSES, SignUpdate(0.1)), capacity=1.0)
        routing = made(torch.empty(12, HIDDEN), samples=3)
        routing.weights.sum().backward()
        made.adapt(made.tallies(), torch.empty((), dtype=torch.bool))
    assert routing.counts.shape == (EXPERTS,)
    assert made.weight.grad.shape == made.weight.shape


def test_it_is_what_the_loop_looks_for() -> None:
    made = router(*LOSSES)
    assert isinstance(made, AddsLosses)
    assert isinstance(made, HasTallies)
    assert isinstance(made, Adapts)
    assert made.loss_terms() == {
        "router_balance": LossTerm(0.5, per="sample"),
        "router_z": LossTerm(0.1, per="position"),
    }


def test_layouts_matter_where_a_part_says_so() -> None:
    assert not router(*(loss for loss in LOSSES if loss.layout_invariant), SignUpdate(0.1)).layout_dependence()
    assert "BatchBalance" in router(BatchBalance(0.1)).layout_dependence()[0]
    assert "capacity drops" in router(capacity=1.0).layout_dependence()[0]


class Entropy:
    """Balancer of a third party."""

    term, layout_invariant = "router_entropy", True

    def loss_term(self) -> LossTerm:
        return LossTerm(-0.01, per="position")

    def total(self, choice: Choice) -> Tensor:
        return torch.special.entr(choice.scores).sum()


def test_balancers_of_other_packages_take_part() -> None:
    made = router(Entropy())
    made.loss_factors()["router_entropy"].fill_(-0.01)
    made(normal(5, HIDDEN)).weights.sum().backward()
    assert made.loss_terms() == {"router_entropy": LossTerm(-0.01, per="position")}
    assert_close_values(made.loss_sums()["router_entropy"], made.tallies()["entropy"])
    assert made.weight.grad.any()


@pytest.mark.parametrize(
    ("balancing", "why"),
    [
        ((SequenceBalance(0.1), BatchBalance(0.1)), "two balancers add the loss term 'router_balance'"),
        ((SignUpdate(0.1), SignUpdate(0.2)), "two balancers update the selection bias"),
        (("auxiliary_loss",), "'auxiliary_loss' is neither"),
    ],
)
def test_balancers_that_do_not_fit_are_refused(balancing: Any, why: str) -> None:
    with pytest.raises(BuildError, match=why):
        router(*balancing)


# --- by name


class Model(Section):
    """Stands for the config of a model."""

    balancing: tuple[Balancing, ...] = ()
    """The field."""


def test_balancers_are_chosen_by_name() -> None:
    chosen = [
        {"name": "auxiliary_loss", "coefficient": 0.01},
        {"name": "auxiliary_loss", "scope": "batch", "coefficient": 0.02},
        {"name": "z_loss"},
        {"name": "bias_update", "rate": 0.5},
    ]
    made = build_balancers(Model.model_validate({"balancing": chosen}).balancing)
    assert made == (SequenceBalance(0.01), BatchBalance(0.02), ZLoss(1e-3), SignUpdate(0.5))


@pytest.mark.parametrize(
    ("chosen", "why"),
    [
        ({"name": "auxiliary_los", "coefficient": 1}, "auxiliary_loss"),
        ({"name": "auxiliary_loss", "coefficient": 0}, "greater than 0"),
        ({"name": "auxiliary_loss"}, "missing"),
        ({"name": "z_loss", "scope": "batch"}, "not a field of 'z_loss'"),
    ],
)
def test_what_cannot_be_chosen_is_refused(chosen: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Model.model_validate({"balancing": [chosen]})
