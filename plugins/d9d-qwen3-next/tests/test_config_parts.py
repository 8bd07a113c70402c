"""Defaults, patterns of layers and sizes of the configs of Qwen3-Next and Qwen3.5, and the fields of their files."""

from __future__ import annotations

from typing import Any

import pytest
from d9d_core.errors import CheckpointError
from d9d_nn.attention.grouped_query import GroupedQueryAttention
from d9d_nn.delta.gated_delta_net import GatedDeltaNet
from d9d_qwen3_next.block import build_block
from d9d_qwen3_next.config import Qwen3NextConfig, Qwen35Config, Qwen35MoeConfig, tiny, tiny_dense, tiny_moe
from d9d_qwen3_next.hugging_face import Qwen3NextHuggingFace, Qwen35HuggingFace, Qwen35MoeHuggingFace
from pydantic import ValidationError

LINEAR, FULL = "linear_attention", "full_attention"
TINY: dict[str, Any] = {"qwen3_next": tiny(), "qwen3_5": tiny_dense(), "qwen3_5_moe": tiny_moe()}
FORMS: dict[str, Any] = {
    "qwen3_next": Qwen3NextHuggingFace(), "qwen3_5": Qwen35HuggingFace(), "qwen3_5_moe": Qwen35MoeHuggingFace(),
}  # fmt: skip


def changed(name: str = "qwen3_5", **fields: Any) -> Any:
    config = TINY[name]
    return type(config).model_validate(config.model_dump() | fields)


def test_defaults_of_fields_that_a_config_leaves_out() -> None:
    needed = {
        "vocab_size": 64, "hidden_size": 32, "num_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_positions": 64, "head_dim": 16, "intermediate_size": 48,
    }  # fmt: skip
    config = Qwen35Config.model_validate(needed)
    defaults = {
        "sliding_window": None, "partial_rotary_factor": 0.25, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
        "layer_types": (LINEAR,) * 3 + (FULL,),
    }  # fmt: skip
    assert {name: getattr(config, name) for name in defaults} == defaults
    assert Qwen35Config.free_on_resume == {"mtp"}
    assert Qwen3NextConfig.free_on_resume == {"mtp", "balancing", "capacity", "expert_files"}
    assert (tiny_moe().renormalise, tiny_moe().dense_layers) == (True, ())
    assert tiny_dense().intermediate_size == 48


@pytest.mark.parametrize(
    ("layers", "given", "found"),
    [
        (4, [LINEAR, FULL], [LINEAR, FULL]),
        (4, [LINEAR, FULL, LINEAR, FULL], [LINEAR, FULL]),
        (4, [FULL] * 4, [FULL]),
        (4, [LINEAR, FULL, FULL, LINEAR], [LINEAR, FULL, FULL]),
        (4, [LINEAR, LINEAR, LINEAR, FULL], [LINEAR, LINEAR, LINEAR, FULL]),
        (3, [LINEAR, FULL, LINEAR, LINEAR], [LINEAR, FULL]),
        (5, [LINEAR, FULL], [LINEAR, FULL]),
        (1, [LINEAR, FULL], [LINEAR]),
        (2, [LINEAR, FULL], [LINEAR, FULL]),
    ],
)
def test_a_pattern_of_layers_is_as_short_as_possible(layers: int, given: list[str], found: list[str]) -> None:
    config = changed(num_layers=layers, layer_types=tuple(given))
    assert list(config.layer_types) == found
    expected = [(given * layers)[layer] == LINEAR for layer in range(layers)]
    assert [config.is_recurrent(layer) for layer in range(layers + 2)] == [*expected, False, False]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"linear_num_key_heads": 3}, "4 is no multiple of linear_num_key_heads = 3; choose a multiple"),
        ({"mtp": {"depths": 2}}, "hold one layer for further tokens, not 2; set depths to 1"),
        ({"mtp": {"depths": 1, "first": "hidden"}}, "have the embedding first; remove 'first'"),
        ({"partial_rotary_factor": 0.125}, "0.125 of head_dim = 8 are 1 rotated features"),
        ({"partial_rotary_factor": 0.1}, "0.1 of head_dim = 8 are 0 rotated features"),
        ({"layer_types": ()}, "layer_types"),
        ({"linear_conv_kernel_dim": 1}, "greater than or equal to 2"),
        ({"sliding_window": 4}, "sliding_window"),
    ],
)
def test_impossible_sizes_are_refused(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        changed(**fields)


def test_sizes_at_their_boundaries_are_accepted() -> None:
    config = changed(mtp={"depths": 1}, linear_num_key_heads=4, linear_conv_kernel_dim=2, partial_rotary_factor=0.25)
    assert (config.mtp.depths, config.rope(1).features) == (1, 2)
    assert changed(partial_rotary_factor=1.0).rope(1).features == 8
    assert (config.key_features, config.linear_value_features) == (4 * 8, 4 * 16)


def test_numbers_and_flops_of_the_two_kinds_of_token_mixers() -> None:
    config = changed(head_dim=10, partial_rotary_factor=0.4)
    keys, values = 2 * 8, 4 * 16
    assert config.mixer_parameters(0) == 32 * (2 * keys + 3 * values + 2 * 4)
    # Queries with their gates, keys, values and outputs.
    assert config.mixer_parameters(1) == 32 * (2 * 4 + 2 + 2 + 4) * 10
    assert config.mixing_flops(0, 16) == 18 * values * 8
    assert config.mixing_flops(1, 16) == 6 * 4 * (10 + 10) * 8
    assert config.kind(0) == (True, None)
    assert config.kind(1) == (False, None)


def test_numbers_of_feed_forward_layers_that_a_token_uses() -> None:
    assert changed().feed_forward_parameters(0) == 3 * 32 * 48
    experts = changed("qwen3_next", dense_layers=(1,), intermediate_size=40)
    assert experts.feed_forward_parameters(0) == 32 * (3 * 2 * 24 + 8 + 3 * 16 + 1)
    assert experts.feed_forward_parameters(1) == 3 * 32 * 40


def test_blocks_have_the_mixers_and_feed_forward_layers_of_the_config() -> None:
    config = changed("qwen3_next", dense_layers=(1,))
    recurrent, attending = build_block(config, 0), build_block(config, 1)
    assert (type(recurrent.attention), type(attending.attention)) == (GatedDeltaNet, GroupedQueryAttention)
    assert (recurrent.is_recurrent, attending.is_recurrent) == (True, False)
    assert (len(recurrent.attention_slots()), len(attending.attention_slots())) == (0, 1)
    shapes = {name: tuple(parameter.shape) for name, parameter in recurrent.ffn.named_parameters()}
    assert shapes["shared_gate.weight"] == (1, 32)
    assert shapes["shared_expert.down_proj.weight"] == (32, 16)
    assert {name.split(".", maxsplit=1)[0] for name, _ in attending.ffn.named_parameters()} == {
        "gate_proj", "up_proj", "down_proj"
    }  # fmt: skip
    further = build_block(changed(num_layers=1, layer_types=(LINEAR,)), 1)
    assert type(further.attention) is GroupedQueryAttention  # of multi-token prediction


@pytest.mark.parametrize("name", TINY)
def test_fields_that_are_written(name: str) -> None:
    form, config = FORMS[name], changed(name, num_layers=3, attention_bias=True)
    data = form.config_json(config, "bfloat16")
    expected: dict[str, Any] = {
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4, "head_dim": 8, "partial_rotary_factor": 0.5, "attention_bias": True,
        "layer_types": [LINEAR, FULL, LINEAR], "pad_token_id": None,
    }  # fmt: skip
    of_experts = {"shared_expert_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2}
    expected |= {"intermediate_size": 48} if name == "qwen3_5" else of_experts
    assert {field: data[field] for field in expected} == expected
    named = {
        "qwen3_next": ("qwen3_next", "Qwen3NextForCausalLM"), "qwen3_5": ("qwen3_5_text", "Qwen3_5ForCausalLM"),
        "qwen3_5_moe": ("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM"),
    }  # fmt: skip
    assert (data["model_type"], *data["architectures"]) == named[name]
    assert data["rope_parameters"]["partial_rotary_factor"] == 0.5
    assert "mtp_num_hidden_layers" not in data
    fixed = {"intermediate_size", "norm_topk_prob", "mlp_only_layers", "decoder_sparse_step"} & data.keys()
    assert bool(fixed) == (name != "qwen3_5_moe")
    assert form.config_from_json(data) == config
    assert form.own_fields(config) == {}
    further = changed(name, mtp={"depths": 1})
    assert form.config_json(further, "bfloat16")["mtp_num_hidden_layers"] == 1
    assert form.own_fields(further)["mtp"]["depths"] == 1
    assert form.example("any") == TINY[name]


@pytest.mark.parametrize("name", TINY)
def test_absent_fields_have_the_defaults_of_transformers(name: str) -> None:
    form = FORMS[name]
    absent = {
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "head_dim": 256, "partial_rotary_factor": 0.25,
    }  # fmt: skip
    names = {*absent, "tie_word_embeddings", "initializer_range", "rope_parameters"}
    data = form.config_json(changed(name, tie_embeddings=True), "bfloat16")
    data = {field: value for field, value in data.items() if field not in names} | {"rope_theta": 1e6}
    found = form.config_from_json(data | {"linear_key_head_dim": None})
    assert {field: getattr(found, field) for field in absent} == absent
    assert (found.tie_embeddings, found.initialization.std, found.rope(1).features) == (False, 0.02, 64)
    inside = {"rope_theta": 1e6, "rope_type": "default", "partial_rotary_factor": 0.5, "mrope_section": [1, 2]}
    assert form.config_from_json(data | {"rope_parameters": inside}).partial_rotary_factor == 0.5


@pytest.mark.parametrize(
    ("fields", "kinds"),
    [
        ({"full_attention_interval": 4}, [LINEAR, LINEAR, LINEAR, FULL]),
        ({}, [LINEAR, LINEAR, LINEAR, FULL]),
        ({"full_attention_interval": 1}, [FULL]),
        ({"full_attention_interval": 2}, [LINEAR, FULL]),
        ({"layer_types": [FULL, LINEAR, LINEAR, FULL], "full_attention_interval": 2}, [FULL, LINEAR, LINEAR]),
    ],
)
def test_kinds_of_layers_come_from_a_list_or_an_interval(fields: dict[str, Any], kinds: list[str]) -> None:
    form = FORMS["qwen3_5"]
    data = form.config_json(changed(num_layers=4), "bfloat16")
    del data["layer_types"]
    assert list(form.config_from_json(data | fields).layer_types) == kinds
    for interval in (0, -2, "4"):
        with pytest.raises(CheckpointError, match=f"full_attention_interval is {interval!r}; set it to a positive"):
            form.config_from_json(data | {"full_attention_interval": interval})
    with pytest.raises(CheckpointError, match="layer_types has 1 entries for 4 layers; give one for each layer"):
        form.config_from_json(data | {"layer_types": [FULL]})


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_the_text_model_of_a_larger_model_has_fields_outside_too(name: str) -> None:
    form = FORMS[name]
    inside = form.config_json(changed(name, tie_embeddings=True), "bfloat16")
    stated = inside.pop("tie_word_embeddings")
    whole = {"model_type": name, "text_config": inside, "tie_word_embeddings": stated, "vision_config": {}}
    assert form.config_from_json(whole) == changed(name, tie_embeddings=True)
    own = {**whole, "text_config": {**inside, "tie_word_embeddings": False}}
    assert form.config_from_json(own).tie_embeddings is False
    with pytest.raises(CheckpointError, match=f"text_config is None, but model_type {name} has the config of its text"):
        form.config_from_json({"model_type": name})
    assert FORMS["qwen3_next"].container == ""


def test_experts_of_qwen3_5_are_always_renormalised_in_all_layers() -> None:
    for fields in ({"renormalise": False}, {"dense_layers": (0,)}):
        with pytest.raises(ValidationError, match=next(iter(fields))):
            changed("qwen3_5_moe", **fields)
    assert isinstance(changed("qwen3_5_moe"), Qwen35MoeConfig)


def test_the_smallest_sizes_are_accepted_and_smaller_ones_are_not() -> None:
    mixers = {
        "linear_num_key_heads": 1, "linear_num_value_heads": 1, "linear_key_head_dim": 1, "linear_value_head_dim": 1,
        "linear_conv_kernel_dim": 2,
    }  # fmt: skip
    for name, smallest in (
        ("qwen3_5", {"intermediate_size": 1}),
        ("qwen3_next", {"shared_expert_intermediate_size": 1}),
    ):
        sizes = mixers | smallest
        config = changed(name, **sizes)
        assert {field: getattr(config, field) for field in sizes} == sizes
        for field, size in sizes.items():
            with pytest.raises(ValidationError, match=field):
                changed(name, **sizes | {field: size - 1})
    for share in (0, 1.5):
        with pytest.raises(ValidationError, match="partial_rotary_factor"):
            changed(partial_rotary_factor=share)
