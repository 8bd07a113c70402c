"""Cost descriptions agree with the models that are built, and with their FLOPs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from d9d_core.cost import Share, StageCost
from d9d_core.errors import BuildError
from d9d_core.model import Stage
from d9d_nn.decoder.flops import head_parameters, layer_parameters
from d9d_qwen3.config import Qwen3Config
from d9d_qwen3.costs import stage_cost
from d9d_qwen3.model import Qwen3
from d9d_qwen3.moe_config import Qwen3MoeConfig

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "num_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 16,
}  # fmt: skip
CONFIGS = {
    "dense": Qwen3Config(**SIZES, intermediate_size=48),
    "tied": Qwen3Config(**SIZES, intermediate_size=48, tie_embeddings=True),
    "biases, sliding": Qwen3Config(
        **SIZES, intermediate_size=48, attention_bias=True, sliding_window=4, sliding_from_layer=3
    ),
    "experts": Qwen3MoeConfig(**SIZES, num_experts=8, experts_per_token=2, moe_intermediate_size=24, dense_layers=(1,)),
}
configs = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())


def parameters(cost: StageCost) -> int:
    return sum((block.parameters + block.expert_parameters) * block.count for block in cost.blocks)


def flops(cost: StageCost, kinds: set[str]) -> float:
    return sum(
        (op.flops + op.backward_flops) * block.count for block in cost.blocks for op in block.ops if op.kind in kinds
    )


@pytest.mark.thorough
@configs
@pytest.mark.parametrize("count", [1, 3])
def test_parameters_are_those_of_the_stages_that_are_built(config: Any, count: int) -> None:
    for index in range(count):
        with torch.device("meta"):
            built = Qwen3(config, Stage(index, count))
        described = stage_cost(config, Stage(index, count), Share(2, 16))
        assert parameters(described) == sum(parameter.numel() for parameter in built.parameters()), index


@configs
@pytest.mark.parametrize("count", [1, 3])
def test_weights_have_the_names_and_shapes_of_the_stages_that_are_built(config: Any, count: int) -> None:
    for index in range(count):
        with torch.device("meta"):
            built = Qwen3(config, Stage(index, count))
        described = {
            f"{name}.{weight.name}" if name else weight.name: weight.shape
            for block in stage_cost(config, Stage(index, count), Share(2, 16)).blocks
            for name in block.names or ("",)
            for op in block.ops
            for weight in op.weights
        }
        own = {name: tuple(parameter.shape) for name, parameter in built.named_parameters()}
        if config.tie_embeddings:  # one name on all stages
            described.pop("embedding.weight", None)
            own = {name: shape for name, shape in own.items() if shape[0] != config.vocab_size}
        assert described == own, index


@configs
def test_ranks_have_the_weights_that_their_parameters_are_counted_from(config: Any) -> None:
    for block in stage_cost(config, Stage(), Share(2, 16, tensor=2)).blocks:
        numbers = sum(weight.numbers for op in block.ops for weight in op.weights)
        tied = config.tie_embeddings and block.name == "norm and heads"
        assert numbers - tied * config.vocab_size // 2 * 32 == block.parameters + block.expert_parameters, block.name


@configs
def test_products_are_six_operations_for_each_parameter_that_a_token_uses(config: Any) -> None:
    cost = stage_cost(config, Stage(), Share(2, 16))
    used = layer_parameters(config) + head_parameters(config, 16)
    assert flops(cost, {"product", "grouped_product"}) == pytest.approx(6 * used * 2 * 16)


@configs
def test_ranks_of_tensor_and_context_parallelism_share_the_products(config: Any) -> None:
    alone = flops(stage_cost(config, Stage(), Share(2, 16)), {"product", "grouped_product", "attention"})
    shared = stage_cost(config, Stage(), Share(2, 16, tensor=2, context=2))
    assert 4 * flops(shared, {"product", "grouped_product", "attention"}) == pytest.approx(alone, rel=0.01)


def test_attention_has_two_products_forward_and_five_backward_over_half_of_all_pairs() -> None:
    cost = stage_cost(CONFIGS["dense"], Stage(), Share(2, 16))
    assert flops(cost, {"attention"}) == pytest.approx(6 * 7 * 2 * (2 * 16) * 8 * 8 * 16)


def test_more_ranks_than_key_and_value_heads_hold_their_weights_whole_and_compute_one_head() -> None:
    four = stage_cost(CONFIGS["dense"], Stage(), Share(2, 16, tensor=4))
    (op,) = (op for block in four.blocks for op in block.ops if op.name == "query, key, value")
    assert [weight.shape for weight in op.weights] == [(32, 32), (32, 32), (32, 32)]  # of 8, 2 and 2 heads
    assert op.flops == 2 * (2 * 16) * 32 * (32 + 16 + 16)


def test_expert_groups_share_the_experts_and_exchange_tokens() -> None:
    alone, spread = (stage_cost(CONFIGS["experts"], Stage(), Share(2, 16, experts=ep)) for ep in (1, 4))
    count = [sum(block.expert_parameters * block.count for block in cost.blocks) for cost in (alone, spread)]
    assert count[0] == 4 * count[1]
    sent = [{exchange.axis for block in cost.blocks for exchange in block.exchanges} for cost in (alone, spread)]
    assert sent == [set(), {"ep"}]


@pytest.mark.parametrize(
    ("name", "share", "text"),
    [
        ("dense", Share(1, 15, tensor=3), "mesh.tp is 3, which does not divide the 8 query heads"),
        ("dense", Share(1, 18, tensor=4), "does not divide the 18 positions"),
        ("dense", Share(1, 16, experts=2), "the model has no experts"),
        ("experts", Share(1, 16, experts=3), "mesh.ep is 3, which does not divide 8 experts"),
    ],
)
def test_shares_that_cannot_be_are_refused(name: str, share: Share, text: str) -> None:
    with pytest.raises(BuildError, match=text):
        stage_cost(CONFIGS[name], Stage(), share)


def test_a_compiler_keeps_the_output_of_the_gate_out_of_memory() -> None:
    eager, compiled = (
        stage_cost(CONFIGS["dense"], Stage(), Share(2, 16, compiled=compiled)) for compiled in (False, True)
    )
    kept = [sum(block.kept * block.count for block in cost.blocks) for cost in (eager, compiled)]
    assert kept[0] - kept[1] == 6 * 2 * (2 * 2 * 16 * 48)
