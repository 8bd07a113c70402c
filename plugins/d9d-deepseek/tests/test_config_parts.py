"""Sizes that follow from a DeepSeek-V3 config, its defaults and its boundaries, stated by hand."""

from __future__ import annotations

from typing import Any

import pytest
from d9d_core.errors import CheckpointError
from d9d_deepseek.config import DeepSeekConfig, tiny
from d9d_deepseek.hugging_face import DeepSeekHuggingFace
from pydantic import ValidationError

FORM = DeepSeekHuggingFace()
NEEDED: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_attention_heads": 4, "max_positions": 64,
    "kv_lora_rank": 16, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 12, "intermediate_size": 48,
    "num_experts": 8, "experts_per_token": 2, "moe_intermediate_size": 24,
}  # fmt: skip


def changed(**fields: Any) -> DeepSeekConfig:
    return DeepSeekConfig.model_validate(tiny().model_dump() | fields)


def test_defaults_of_fields_that_a_config_leaves_out() -> None:
    config = DeepSeekConfig.model_validate(NEEDED)
    defaults = {
        "num_key_value_heads": 4, "head_dim": 16, "sliding_window": None, "attention_bias": False, "q_lora_rank": None,
        "first_expert_layer": 0, "num_shared_experts": 1, "num_groups": 1, "top_groups": 1, "renormalise": True,
        "routed_scale": 1.0, "balancing": (), "capacity": None,
    }  # fmt: skip
    assert {name: getattr(config, name) for name in defaults} == defaults
    assert DeepSeekConfig.free_on_resume == {"balancing", "capacity", "mtp"}
    small = tiny()
    sizes = {
        "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
        "head_dim": 24, "num_key_value_heads": 4, "intermediate_size": 48, "first_expert_layer": 1, "num_experts": 8,
        "experts_per_token": 2, "moe_intermediate_size": 24, "num_groups": 4, "top_groups": 2, "routed_scale": 1.5,
        "hidden_size": 32, "num_layers": 2, "vocab_size": 64, "max_positions": 64,
    }  # fmt: skip
    assert {name: getattr(small, name) for name in sizes} == sizes


@pytest.mark.parametrize(
    "fields",
    [
        {"v_head_dim": 24},
        {"num_layers": 3, "first_expert_layer": 2},
        {"num_groups": 8, "top_groups": 8},
        {"top_groups": 4},
        {"top_groups": 1},  # two experts in a group
        {"num_key_value_heads": 0, "head_dim": 0},
        {"qk_nope_head_dim": 2, "qk_rope_head_dim": 2, "head_dim": 4, "v_head_dim": 4},
    ],
)
def test_sizes_at_their_boundaries_are_accepted(fields: dict[str, Any]) -> None:
    config = changed(**fields)
    assert config.num_key_value_heads == 4
    assert config.head_dim == config.qk_nope_head_dim + config.qk_rope_head_dim


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"qk_nope_head_dim": "many", "head_dim": 0}, "qk_nope_head_dim"),
        ({"num_attention_heads": None, "num_key_value_heads": 0}, "num_attention_heads"),
        ({"q_lora_rank": 0}, "q_lora_rank"),
        ({"kv_lora_rank": 0}, "kv_lora_rank"),
        ({"num_shared_experts": 0}, "num_shared_experts"),
        ({"first_expert_layer": -1}, "first_expert_layer"),
        ({"routed_scale": 0}, "routed_scale"),
        ({"capacity": float("inf")}, "capacity"),
    ],
)
def test_values_of_another_kind_are_refused_at_their_field(fields: dict[str, Any], place: str) -> None:
    with pytest.raises(ValidationError) as caught:
        changed(**fields)
    assert caught.value.errors()[0]["loc"][0] == place
    with pytest.raises(ValidationError):
        DeepSeekConfig.model_validate("671b")


def test_layers_have_experts_from_the_first_one_on() -> None:
    config = changed(num_layers=4, first_expert_layer=2)
    assert [config.has_experts(layer) for layer in range(4)] == [False, False, True, True]
    assert [config.kind(layer) for layer in range(4)] == [False, False, True, True]


def test_facts_about_attention() -> None:
    plain, biased = changed(), changed(attention_bias=True)
    assert (plain.rope(1).features, plain.rope(1).theta, plain.value_features()) == (8, plain.rope_theta, 12)
    assert plain.biased_projections() == frozenset()
    assert biased.biased_projections() == {"down", "kv_down", "o_proj"}


@pytest.mark.parametrize(("rank", "queries"), [(20, 20 * (32 + 96)), (None, 32 * 96)])
def test_numbers_of_attention_that_a_token_uses(rank: int | None, queries: int) -> None:
    config = changed(q_lora_rank=rank, v_head_dim=10)
    assert config.mixer_parameters(0) == queries + 32 * (16 + 8) + 16 * 4 * (16 + 10) + 32 * 4 * 10


@pytest.mark.parametrize("shared", [1, 3])
def test_numbers_of_feed_forward_layers_that_a_token_uses(shared: int) -> None:
    config = changed(num_shared_experts=shared)
    assert config.feed_forward_parameters(0) == 3 * 32 * 48
    assert config.feed_forward_parameters(1) == 32 * 3 * (2 + shared) * 24 + 32 * 8


def test_a_config_json_has_the_sizes_of_attention_and_of_experts() -> None:
    config = changed(mtp={"depths": 2, "first": "hidden"}, num_shared_experts=2, renormalise=False, attention_bias=True)
    written = FORM.config_json(config, "bfloat16")
    expected = {
        "intermediate_size": 48, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
        "v_head_dim": 12, "first_k_dense_replace": 1, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 24, "n_shared_experts": 2, "n_group": 4, "topk_group": 2, "norm_topk_prob": False,
        "routed_scaling_factor": 1.5, "head_dim": 8, "attention_bias": True, "rope_interleave": True,
        "moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_nextn_predict_layers": 2,
        "mtp_hidden_states_first": True, "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"],
    }  # fmt: skip
    assert {name: written[name] for name in expected} == expected
    assert FORM.config_from_json(written) == config
    assert "mtp_hidden_states_first" not in FORM.config_json(changed(mtp={"depths": 2}), "bfloat16")


def test_fields_of_its_own_are_written_only_if_they_are_set() -> None:
    assert FORM.own_fields(tiny()) == {}
    assert FORM.own_fields(changed(capacity=1.5)) == {"capacity": 1.5}
    assert set(FORM.own_fields(changed(balancing=["z_loss"], mtp={"depths": 1}))) == {"balancing", "mtp"}


@pytest.mark.parametrize(("further", "accepted"), [(0, True), (None, True), (8, True), (9, False), ("1", False)])
def test_up_to_eight_layers_for_further_tokens_are_read_and_stay_off(further: Any, accepted: bool) -> None:
    data = FORM.config_json(tiny(), "bfloat16") | {"num_nextn_predict_layers": further}
    if accepted:
        assert FORM.config_from_json(data) == tiny()
        return
    with pytest.raises(CheckpointError, match=f"num_nextn_predict_layers is {further!r}; d9d reads models with 0 to 8"):
        FORM.config_from_json(data)


def test_files_with_the_hidden_state_first_say_so() -> None:
    data = FORM.config_json(tiny(), "bfloat16") | {"mtp_hidden_states_first": True}
    found = FORM.config_from_json(data)
    assert (found.mtp.depths, found.mtp.first) == (0, "hidden")
    turned_on = changed(mtp={"depths": 1})
    with pytest.raises(
        CheckpointError, match=r"model\.mtp\.first is embedding, .* read the hidden first; set it to hidden"
    ):
        FORM.importer(turned_on, found)
    FORM.importer(changed(mtp={"depths": 0}), found)
    FORM.importer(changed(mtp={"depths": 1, "first": "hidden"}), found)


SMALLEST = {
    "q_lora_rank": 1, "kv_lora_rank": 1, "v_head_dim": 1, "intermediate_size": 1, "num_experts": 1,
    "experts_per_token": 1, "moe_intermediate_size": 1, "num_shared_experts": 1, "num_groups": 1, "top_groups": 1,
    "first_expert_layer": 0,
}  # fmt: skip


def test_the_smallest_sizes_are_accepted_and_smaller_ones_are_not() -> None:
    config = changed(**SMALLEST)
    assert {name: getattr(config, name) for name in SMALLEST} == SMALLEST
    for name, size in SMALLEST.items():
        with pytest.raises(ValidationError, match=name):
            changed(**SMALLEST | {name: size - 1})
