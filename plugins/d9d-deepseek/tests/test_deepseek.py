"""Sizes, costs and FLOPs of DeepSeek-V3, and configs that it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from d9d_core.cost import AttentionShape, OpCost, Share, StageCost
from d9d_core.errors import BuildError
from d9d_core.model import Stage
from d9d_deepseek.config import DeepSeekConfig, tiny
from d9d_deepseek.costs import stage_cost
from d9d_deepseek.model import DeepSeek
from d9d_deepseek.presets import PRESETS
from d9d_moe.costs import mixture
from d9d_moe.experts.layer import MoELayer
from d9d_nn.decoder.costs import gated_cost, swiglu_cost
from d9d_nn.decoder.flops import further_parameters, head_parameters, layer_parameters, training_flops_per_token
from d9d_nn.swiglu import SwiGLU
from d9d_testing.suites.fresh import import_fresh
from pydantic import ValidationError
from torch.utils.flop_counter import FlopCounterMode

#: Numbers of parameters and selection biases of the published files, without layers that predict further tokens, and
#: billions of active parameters.
PUBLISHED = {"671b": (671_026_419_200, 37.0), "moonlight-16b-a3b": (15_960_110_208, 2.9)}


def changed(**fields: Any) -> DeepSeekConfig:
    return DeepSeekConfig.model_validate(tiny().model_dump() | fields)


CONFIGS = {
    "latent queries": changed(num_layers=3),
    "plain queries": changed(q_lora_rank=None, attention_bias=True),
    "no dense layer": changed(first_expert_layer=0, num_shared_experts=2),
    "further tokens": changed(mtp={"depths": 2}, num_layers=3),
}
configs = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


@pytest.mark.thorough
@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_has_the_published_number_of_parameters(preset: str) -> None:
    config = DeepSeekConfig.model_validate({"preset": preset})
    total, billions = PUBLISHED[preset]
    with torch.device("meta"):
        model = DeepSeek(config)
    biases = sum(buffer.numel() for name, buffer in model.named_buffers() if name.endswith("selection_bias"))
    assert sum(parameter.numel() for parameter in model.parameters()) + biases == total
    used = training_flops_per_token(config, 1) / 6 + model.embedding.weight.numel()
    assert used / 1e9 == pytest.approx(billions, rel=0.02)
    blocks = stage_cost(config, Stage(), Share(1, 32)).blocks
    assert sum(block.count * (block.parameters + block.expert_parameters) for block in blocks) == total - biases


@configs
def test_flops_are_what_a_step_executes(config: DeepSeekConfig) -> None:
    length = 16
    torch.manual_seed(0)
    model, tokens = DeepSeek(config), torch.randint(config.vocab_size, (2, length))
    with FlopCounterMode(display=False) as counter:
        model(tokens=tokens, targets=tokens)["token_loss"].sum().backward()
    # The reference computes the whole square of attention, the formula counts its causal half.
    layers = config.num_layers + config.mtp.depths
    half = 3 * layers * config.num_attention_heads * (config.head_dim + config.v_head_dim) * length
    # Experts skip the last k positions of a sample at depth k.
    skipped = sum(range(config.mtp.depths + 1)) / length
    experts = 18 * config.hidden_size * config.moe_intermediate_size * config.experts_per_token
    found = counter.get_total_flops() / tokens.numel()
    assert found == training_flops_per_token(config, length) + half - skipped * experts


def weights(cost: StageCost) -> dict[str, tuple[int, ...]]:
    return {
        f"{name}.{weight.name}" if name else weight.name: weight.shape
        for block in cost.blocks
        for name in block.names or ("",)
        for op in block.ops
        for weight in op.weights
    }


@pytest.mark.parametrize(
    "config",
    [*CONFIGS.values(), changed(mtp={"depths": 1}, tie_embeddings=True)],
    ids=[*CONFIGS, "further tokens, tied"],
)
@pytest.mark.parametrize("count", [1, 2])
def test_weights_have_the_names_and_shapes_of_the_stages_that_are_built(config: DeepSeekConfig, count: int) -> None:
    for index in range(count):
        with torch.device("meta"):
            built = DeepSeek(config, Stage(index, count))
        own = {name: tuple(parameter.shape) for name, parameter in built.named_parameters()}
        cost = stage_cost(config, Stage(index, count), Share(2, 16))
        assert weights(cost) == own
        counted = sum(block.count * (block.parameters + block.expert_parameters) for block in cost.blocks)
        assert counted == sum(parameter.numel() for parameter in built.parameters())


@configs
def test_costs_count_the_parameters_and_products_of_the_model(config: DeepSeekConfig) -> None:
    for share in (Share(2, 16), Share(2, 16, tensor=2)):
        for block in stage_cost(config, Stage(), share).blocks:
            numbers = sum(weight.numbers for op in block.ops for weight in op.weights)
            assert numbers == block.parameters + block.expert_parameters, block.name
    cost = stage_cost(config, Stage(), Share(2, 16))
    used = layer_parameters(config) + head_parameters(config, 16) + further_parameters(config)
    flops = sum(
        (op.flops + op.backward_flops) * block.count
        for block in cost.blocks
        for op in block.ops
        if op.kind in ("product", "grouped_product")
    )
    assert flops == pytest.approx(6 * used * 2 * 16)


def test_costs_of_attention_are_those_of_its_parts() -> None:
    # 32 tokens of 32 features, in 2 bytes; on each of two ranks 2 heads of 16 + 8 features, and of 12 for values.
    cost = stage_cost(changed(attention_bias=True), Stage(), Share(2, 16, tensor=2))
    ops = {op.name: op for op in cost.blocks[1].ops}
    products = {
        "q_proj.down": (32 * 24, 2 * 32 * 32), "q_proj.up": (24 * 48, 2 * 32 * 24), "kv_down": (32 * 24, 0),
        "kv_up": (16 * 56, 2 * 32 * 16), "o_proj": (24 * 32, 2 * 32 * 24),
    }  # fmt: skip
    for name, (numbers, kept) in products.items():
        assert (ops[name].flops, ops[name].kept) == (2 * 32 * numbers, kept), name
    cuts = {weight.name.removeprefix("attention."): weight.cut for name in products for weight in ops[name].weights}
    assert cuts == {
        "q_proj.down.weight": None, "q_proj.down.bias": None, "q_proj.up.weight": 0, "kv_down.weight": None,
        "kv_down.bias": None, "kv_up.weight": 0, "o_proj.weight": 1, "o_proj.bias": None,
    }  # fmt: skip
    joined = 2 * 2 * 32 * 2 * 3 * 24  # queries, keys and padded values are read and written
    assert ops["joined heads"] == OpCost("joined heads", "memory", traffic=joined, backward_traffic=joined)
    assert ops["rope"].traffic == 2 * 2 * 32 * 3 * 8  # two heads of queries and one of keys
    assert [ops[name].kept for name in ("query norm", "latent norm")] == [32 * (2 * 24 + 4), 32 * (2 * 16 + 4)]
    assert ops["attention"].attention == AttentionShape(32, 2, 2, 24, 2, latent=24, expanded=56)
    (plain,) = (
        op for op in stage_cost(changed(q_lora_rank=None), Stage(), Share(2, 16)).blocks[1].ops if op.name == "q_proj"
    )
    assert (plain.flops, plain.kept, plain.weights[0].cut) == (2 * 32 * 32 * 96, 2 * 32 * 32, 0)


@pytest.mark.parametrize("tensor", [1, 2])
def test_costs_of_experts_are_those_of_routed_and_shared_ones(tensor: int) -> None:
    config, share = changed(num_shared_experts=2), Share(2, 16, tensor=tensor, experts=2)
    _, dense, block, _ = stage_cost(config, Stage(), share).blocks
    routed = mixture(share, 32, 24, 8, 2)
    shared = gated_cost(config, share, 48, "ffn.shared_expert", keeps_input=tensor == 2)
    ops = (*routed.ops, *shared.ops)
    assert (block.name, block.ops[-len(ops) :]) == (routed.name, ops)
    states = 3 * 2 * 32 // tensor * 32  # hidden states and their gradients
    assert block.workspace == pytest.approx(states + routed.workspace + shared.workspace)
    own, backward = ((*routed.exchanges, *shared.exchanges), (*routed.backward_exchanges, *shared.backward_exchanges))
    around = 2 * (tensor - 1)  # exchanges of attention
    assert (block.exchanges[around:], block.backward_exchanges[around:]) == (own, backward)
    assert (dense.name, dense.ops[-3:]) == (swiglu_cost(config, 0, share).name, swiglu_cost(config, 0, share).ops)


@pytest.mark.parametrize(
    ("share", "said"),
    [
        (Share(1, 16, tensor=3), "mesh.tp is 3, which does not divide the 4 query heads"),
        (Share(1, 16, experts=3), "mesh.ep is 3, which does not divide 8 experts"),
    ],
)
def test_shares_that_cannot_be_are_refused(share: Share, said: str) -> None:
    with pytest.raises(BuildError, match=said):
        stage_cost(tiny(), Stage(), share)


def test_layers_are_dense_up_to_the_first_with_experts() -> None:
    model = DeepSeek(changed(num_layers=3, first_expert_layer=2))
    assert [type(layer.ffn) for layer in model.layers.values()] == [SwiGLU, SwiGLU, MoELayer]
    assert model.layers["2"].ffn.shared_expert.down_proj.weight.shape == (32, 24)
    assert "layers.2.ffn.router.selection_bias" in model.state_dict()


def test_routers_are_what_the_config_says() -> None:
    router = DeepSeek(changed(renormalise=False, capacity=1.5, routed_scale=2.5)).layers["1"].ffn.router
    assert (router.experts, router.top_k, router.scoring, router.groups) == (8, 2, "sigmoid", 4)
    assert (router.top_groups, router.scale, router.renormalise, router.capacity) == (2, 2.5, False, 1.5)


@pytest.mark.parametrize(
    ("changes", "field", "text"),
    [
        ({"num_key_value_heads": 2}, "num_key_value_heads", "2 is not num_attention_heads = 4"),
        ({"qk_rope_head_dim": 6}, "qk_rope_head_dim", r"16 \+ 6 features are not head_dim = 24; remove head_dim"),
        ({"qk_rope_head_dim": 7, "head_dim": 0, "qk_nope_head_dim": 17}, "qk_rope_head_dim", "7 is odd"),
        ({"v_head_dim": 25}, "v_head_dim", "25 is more than the 24 features of a key head"),
        ({"first_expert_layer": 2}, "first_expert_layer", "2 leaves no layer of 2 with experts; give at most 1"),
        ({"num_groups": 3}, "num_groups", "3 does not divide num_experts = 8"),
        ({"top_groups": 5}, "top_groups", "5 is more than num_groups = 4"),
        ({"top_groups": 1, "experts_per_token": 3}, "top_groups", "1 of 4 groups have 2 experts, fewer than"),
        ({"balancing": ["z_loss", "z_loss"]}, "balancing", "z_loss appears twice; keep one"),
        ({"sliding_window": 4}, "sliding_window", "None"),
    ],
)
def test_impossible_configs_are_refused_where_they_are_wrong(changes: dict[str, Any], field: str, text: str) -> None:
    with pytest.raises(ValidationError, match=text) as caught:
        changed(**changes)
    assert caught.value.errors()[0]["loc"][0] == field


def test_sizes_of_heads_follow_from_their_parts() -> None:
    config = DeepSeekConfig.model_validate({"preset": "671b", "qk_nope_head_dim": 64})
    assert (config.head_dim, config.num_key_value_heads) == (128, 128)
    assert DeepSeekConfig.model_validate(config.model_dump(mode="json")) == config


def test_a_config_is_checked_and_its_costs_are_predicted_without_torch() -> None:
    facts = import_fresh("d9d_deepseek.config", "d9d_deepseek.costs")
    assert "torch" not in facts["d9d_deepseek.config"].modules | facts["d9d_deepseek.costs"].modules
