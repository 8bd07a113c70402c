"""Experts of transformers' models are balanced by d9d's losses and bias updates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from d9d_core.errors import BuildError
from d9d_core.model import Stage
from d9d_core.strategy import StepShape
from d9d_core.traits import LateInit, modules_with
from d9d_moe.balancing.balancers import build_balancers
from d9d_moe.balancing.base import BalancingLoss, Choice
from d9d_transformers.balance import Balance
from d9d_transformers.build import build
from d9d_transformers.config import TransformersConfig, example
from d9d_transformers.mixing import parts_of
from d9d_transformers.model import TransformersModel
from d9d_transformers.routers import RouterFacts, scores_of
from torch import Tensor

AUXILIARY = {"name": "auxiliary_loss", "coefficient": 0.01}
UPDATE = {"name": "bias_update", "rate": 0.01}


def config_of(kind: str, *balancing: Any, **fields: Any) -> TransformersConfig:
    return TransformersConfig(config={**example(kind).config, **fields}, balancing=balancing)


def built(config: TransformersConfig) -> TransformersModel:
    torch.manual_seed(0)
    with torch.device("meta"):
        model = build(config, Stage())
    model.to_empty(device="cpu")
    for module in modules_with(model, LateInit).values():
        module.reset_parameters()
    return model


def balances(model: TransformersModel) -> list[Balance]:
    return [module for module in model.modules() if isinstance(module, Balance)]


@pytest.mark.parametrize(
    ("kind", "owner", "facts"),
    [
        ("qwen3_moe", "Qwen3MoeSparseMoeBlock", RouterFacts("gate", "softmax", None)),
        ("mixtral", "MixtralSparseMoeBlock", RouterFacts("gate", "softmax", None)),
        ("deepseek_v3", "DeepseekV3MoE", RouterFacts("gate", "sigmoid", "gate.e_score_correction_bias")),
        ("gpt_oss", "GptOssMLP", RouterFacts("router", "softmax", None)),
    ],
)
def test_the_scores_of_a_router_are_found_in_a_small_model(kind: str, owner: str, facts: RouterFacts) -> None:
    assert parts_of(example(kind)).routers == {owner: facts}


@pytest.mark.parametrize(("kind", "scoring"), [("qwen3_moe", "softmax"), ("deepseek_v3", "sigmoid")])
def test_losses_and_tallies_are_of_the_choices_that_the_router_makes(kind: str, scoring: str) -> None:
    model = built(config_of(kind, AUXILIARY, "z_loss"))
    logits: list[Tensor] = []
    for module in model.modules():
        if type(module).__name__.endswith("TopkRouter") or type(module).__name__.endswith("TopKRouter"):
            module.register_forward_hook(
                lambda *given: logits.append(given[2][0] if isinstance(given[2], tuple) else given[2])
            )
    chosen: list[Tensor] = []
    for balance in balances(model):
        balance.register_forward_hook(lambda *given: chosen.append(given[1][1]))
    model(tokens=torch.randint(3, 100, (3, 8), generator=torch.Generator().manual_seed(0)))
    assert len(logits) == len(chosen) == len(balances(model)) > 0
    for balance, scored, index in zip(balances(model), logits, chosen, strict=True):
        choice = Choice(scored.float(), scores_of(scored.float(), scoring), index, 3)
        for balancer in build_balancers(config_of(kind, AUXILIARY, "z_loss").balancing or ()):
            assert isinstance(balancer, BalancingLoss)
            torch.testing.assert_close(balance.loss_sums()[balancer.term], balancer.total(choice))
        assert torch.equal(balance.tallies()["expert_tokens"], index.flatten().bincount(minlength=balance.experts))
        assert balance.tallies()["tokens"] == 24


def test_a_factor_of_a_term_adds_its_gradient_to_the_router_and_to_hidden_states() -> None:
    tokens = torch.randint(3, 100, (3, 8), generator=torch.Generator().manual_seed(0))
    gradients = []
    for factor in (0.0, 1.0):
        model = built(config_of("qwen3_moe", AUXILIARY))
        for balance in balances(model):
            balance.loss_factors()["router_balance"].fill_(factor)
        model(tokens=tokens)["logits"].sum().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    plain, balanced = gradients
    changed = {name for name, gradient in plain.items() if not torch.equal(gradient, balanced[name])}
    assert "model.layers.0.mlp.gate.weight" in changed
    assert "model.embed_tokens.weight" in changed
    assert "lm_head.weight" not in changed


@pytest.mark.parametrize(("itemsize", "logits"), [(2, 4), (4, 4), (8, 8)])
def test_ranks_gather_logits_in_float32_or_wider_and_the_numbers_of_chosen_experts(itemsize: int, logits: int) -> None:
    parent = torch.nn.ModuleDict({"gate": torch.nn.Linear(2, 2)})
    balance = Balance(16, 2, build_balancers(()), parent, RouterFacts("gate", "softmax", None))
    step = StepShape(("forward",), samples=3, positions=5, itemsize=itemsize)
    assert balance.forward_collectives(step) == [("all_gather", 15 * 16 * logits), ("all_gather", 15 * 2 * 8)]


def test_padding_is_not_counted() -> None:
    tokens = torch.randint(3, 100, (2, 8), generator=torch.Generator().manual_seed(0))
    alone, padded = (
        built(config_of("qwen3_moe", AUXILIARY, "z_loss")),
        built(config_of("qwen3_moe", AUXILIARY, "z_loss")),
    )
    alone(tokens=tokens)
    padded(tokens=torch.nn.functional.pad(tokens, (0, 5)), lengths=torch.tensor([8, 8]))
    for one, other in zip(balances(alone), balances(padded), strict=True):
        for name, tally in one.tallies().items():
            torch.testing.assert_close(other.tallies()[name], tally)
        for name, total in one.loss_sums().items():
            torch.testing.assert_close(other.loss_sums()[name], total)


def test_padded_samples_of_balanced_experts_are_refused_in_a_pipeline() -> None:
    with torch.device("meta"):
        stage = build(config_of("qwen3_moe", AUXILIARY), Stage(0, 2))
    with pytest.raises(ValueError, match="samples are padded"):
        stage(tokens=torch.zeros(2, 8, dtype=torch.int64), lengths=torch.tensor([8, 4]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_update_moves_the_selection_bias_towards_experts_with_less_load(dtype: torch.dtype) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        balance = balances(built(config_of("deepseek_v3", UPDATE)))[0]
    finally:
        torch.set_default_dtype(before)
    assert set(balance.adapts_to()) == {"expert_tokens"}
    (owner,) = balance._owner
    bias = owner.get_buffer("e_score_correction_bias")
    assert bias.dtype == torch.float32
    balance.adapt({"expert_tokens": torch.tensor([4, 0, 2, 2])}, torch.tensor(False))
    assert not bias.any()
    balance.adapt({"expert_tokens": torch.tensor([4, 0, 2, 2])}, torch.tensor(True))
    torch.testing.assert_close(bias, torch.tensor([-0.01, 0.01, 0.0, 0.0]))


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (config_of("llama"), "has no experts that d9d computes"),
        (config_of("qwen3_moe", UPDATE), "has no buffer that biases the selection"),
        (config_of("phimoe"), "cannot tell how the router of Phimoe"),
        (TransformersConfig(config={**example("mixtral").config, "output_router_logits": True}), "set model.balancing"),
    ],
)
def test_balancing_that_has_no_effect_is_refused_with_the_reason(config: TransformersConfig, text: str) -> None:
    with torch.device("meta"), pytest.raises(BuildError, match=text):
        build(config, Stage())


def test_without_balancing_routers_are_not_observed() -> None:
    assert not balances(built(example("qwen3_moe")))
    observed = balances(built(config_of("qwen3_moe")))
    assert observed
    assert not observed[0].loss_terms()


class Repeated:
    """Share of a rank whose neighbour has the same positions."""

    def __init__(self) -> None:
        self.gathered: list[tuple[int, ...]] = []

    def gather(self, tensor: Tensor) -> Tensor:
        self.gathered.append(tuple(tensor.shape))
        return torch.cat([tensor, tensor], dim=1)


def alone(*balancing: Any, bias: bool = False) -> tuple[Balance, torch.nn.ModuleDict]:
    """Balance of 4 experts, of which 2 compute a token, and the module that contains its router."""
    torch.manual_seed(0)
    parent = torch.nn.ModuleDict({"gate": torch.nn.Linear(6, 4, bias=bias), "inner": torch.nn.Module()})
    parent["inner"].register_buffer("bias", torch.zeros(4, dtype=torch.bfloat16))
    balancers = build_balancers(config_of("qwen3_moe", *balancing).balancing or ())
    return Balance(4, 2, balancers, parent, RouterFacts("gate", "softmax", "inner.bias")), parent


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("bias", [False, True])
def test_a_balance_scores_all_experts_again_in_a_wide_dtype(dtype: torch.dtype, bias: bool) -> None:
    balance, parent = alone("z_loss", bias=bias)
    hidden = torch.randn(6, 6).to(dtype)
    indices = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0], [0, 2], [1, 3]])
    weights = torch.rand(6, 2)
    balance.samples = 2
    assert torch.equal(balance(hidden, indices, weights), weights)
    gate: Any = parent["gate"]
    wide = torch.promote_types(dtype, torch.float32)
    logits = hidden.to(wide) @ gate.weight.to(wide).T + (gate.bias.to(wide) if bias else 0)
    expected = logits.logsumexp(1).square().sum()
    (found,) = balance.loss_sums().values()
    torch.testing.assert_close(found, expected, check_dtype=False, rtol=1e-5, atol=1e-5)
    assert balance.tallies()["expert_tokens"].tolist() == [3, 3, 3, 3]


def test_ranks_of_tp_count_all_positions_sample_by_sample() -> None:
    balance, _ = alone("z_loss")
    share = Repeated()
    balance.see_sequence(share)  # type: ignore[arg-type]
    balance.samples = 2
    balance.padding = torch.tensor([False, False, False, True] * 2)
    indices = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0]])
    balance(torch.randn(4, 6), indices, torch.rand(4, 2))
    assert share.gathered == [(2, 2, 4), (2, 2, 2)]
    # Of the positions 0, 1, 0, 1 of the first sample and 2, 3, 2, 3 of the second one, the last ones are padding.
    assert balance.tallies()["expert_tokens"].tolist() == [2 + 1, 2 + 1, 1 + 2, 2 + 1]
    assert balance.tallies()["tokens"] == 6


def test_a_selection_bias_is_updated_in_float32() -> None:
    balance, parent = alone(UPDATE)
    bias = parent["inner"].get_buffer("bias")
    assert bias.dtype == torch.float32
    balance.adapt({"expert_tokens": torch.tensor([0, 8, 4, 4])}, torch.tensor(True))
    torch.testing.assert_close(bias, torch.tensor([0.01, -0.01, 0.0, 0.0]))
    without, parent = alone("z_loss")
    assert list(without.adapts_to()) == []
    without.adapt({}, torch.tensor(True))
    assert parent["inner"].get_buffer("bias").dtype == torch.bfloat16


def test_two_balancers_of_one_bias_are_refused() -> None:
    balancers = build_balancers(config_of("qwen3_moe", UPDATE).balancing or ())
    parent = torch.nn.ModuleDict({"gate": torch.nn.Linear(6, 4)})
    with pytest.raises(BuildError, match="two balancers update the selection bias; keep one of them"):
        Balance(4, 2, [*balancers, *balancers], parent, RouterFacts("gate", "softmax", "gate.bias"))
    with pytest.raises(BuildError, match="the router of ModuleDict has no buffer that biases the selection"):
        Balance(4, 2, balancers, parent, RouterFacts("gate", "softmax", "gate.bias"))  # a parameter
    assert Balance(4, 2, (), parent, RouterFacts("gate", "softmax", None)).samples == 1
