"""Configs of stand-in types: their sizes, smaller configs, and examples, as exact fields."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from d9d_core.errors import CheckpointError
from d9d_transformers import library
from d9d_transformers.config import TransformersConfig, example, tiny
from d9d_transformers.hugging_face import TransformersFormat
from pydantic import ValidationError

FULL, SLIDING, CONV = "full_attention", "sliding_attention", "conv"


@pytest.fixture
def defaults(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Defaults of the one type that transformers has in this test; fields of a config replace them."""
    known: dict[str, Any] = {}
    monkeypatch.setattr(
        library, "native_config", lambda values: SimpleNamespace(to_dict=lambda: {**known, **dict(values)})
    )
    return known


def config(**fields: Any) -> TransformersConfig:
    return TransformersConfig(config={"model_type": "stand_in", **fields})


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"model_type": ""}, "model.config has no model_type"),
        ({"model_type": None}, "model.config has no model_type"),
        ({"hidden_size": 0}, "hidden_size is 0; it must be at least 1"),
        ({"vocab_size": -1}, "vocab_size is -1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ({"num_attention_heads": 6, "num_key_value_heads": 4}, "num_key_value_heads = 4 does not divide"),
        ({"num_attention_heads": 2, "num_key_value_heads": 4}, "num_key_value_heads = 4 does not divide"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: quantized weights"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder: d9d trains decoders"),
    ],
)
def test_fields_of_no_decoder_are_refused(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        config(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"hidden_size": 1, "vocab_size": 1, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1},
        {"num_attention_heads": 6, "num_key_value_heads": 3},
        {"num_attention_heads": 6},
        {"num_key_value_heads": 4},
        {"num_attention_heads": 6, "num_key_value_heads": None},
        {"hidden_size": False, "vocab_size": "0", "num_hidden_layers": None},
        {"quantization_config": None, "is_encoder_decoder": False},
    ],
)
def test_smallest_sizes_and_absent_ones_are_accepted(fields: dict[str, Any]) -> None:
    volatile = dict.fromkeys(("_name_or_path", "dtype", "torch_dtype", "transformers_version", "use_cache"), "x")
    assert config(**fields, **volatile).config == {"model_type": "stand_in", **fields}


def test_facts_of_a_config_are_its_own_fields() -> None:
    one = config(vocab_size=9, max_position_embeddings=7)
    assert (one.model_type, one.vocab_size, one.max_positions) == ("stand_in", 9, 7)
    none = config(vocab_size=True, max_position_embeddings="7")
    assert (none.vocab_size, none.max_positions) == (None, None)
    assert (none.container, none.balancing, none.name) == (None, None, "transformers")
    assert TransformersConfig.free_on_resume == {"balancing"}


def test_sizes_are_the_whole_numbers_that_a_smaller_model_may_reduce(defaults: dict[str, Any]) -> None:
    defaults.update(hidden_size=64, head_dim=None, moe_k=True, rms_norm_eps=1, vocab_size=100, n_embd=12)
    assert config(vocab_size=200).sizes() == {"hidden_size": 64, "vocab_size": 200, "n_embd": 12}


@pytest.mark.parametrize(
    ("fields", "sizes", "changed"),
    [
        ({"num_attention_heads": 8, "num_key_value_heads": 8}, {"num_key_value_heads": 2}, {"num_key_value_heads": 8}),
        (
            {"num_attention_heads": 8, "num_key_value_heads": 8},
            {"num_attention_heads": 4, "num_key_value_heads": 2},
            {"num_attention_heads": 4, "num_key_value_heads": 4},
        ),
        (
            {"num_attention_heads": 8, "num_key_value_heads": 4},
            {"num_attention_heads": 4, "num_key_value_heads": 2},
            {"num_attention_heads": 4, "num_key_value_heads": 2},
        ),
        (
            {"num_attention_heads": 8, "num_key_value_heads": 8},
            {"num_attention_heads": 16},
            {"num_attention_heads": 16},
        ),
        (
            {"num_hidden_layers": 4, "layer_types": [FULL, FULL, SLIDING, CONV], "other": [1, 2, 3], "text": "abcd"},
            {"num_hidden_layers": 2},
            {"num_hidden_layers": 2, "layer_types": [FULL, SLIDING]},
        ),
        (
            {"num_hidden_layers": 4, "layer_types": [FULL, FULL, FULL, CONV]},
            {"num_hidden_layers": 3},
            {"num_hidden_layers": 3, "layer_types": [FULL, FULL, CONV]},
        ),
        (
            {"num_hidden_layers": 4, "layer_types": [FULL, SLIDING, FULL, SLIDING]},
            {"num_hidden_layers": 4},
            {"num_hidden_layers": 4, "layer_types": [FULL, SLIDING, FULL, SLIDING]},
        ),
        ({"num_hidden_layers": 2, "layer_types": [FULL, FULL]}, {"hidden_size": 8}, {"hidden_size": 8}),
        ({"layer_types": [FULL, FULL]}, {"num_hidden_layers": 1}, {"num_hidden_layers": 1}),
        (
            {
                "vocab_size": 50,
                "pad_token_id": 4,
                "bos_token_id": 3,
                "eos_token_id": 7,
                "eos_ids": 8,
                "x_token_id": [9],
            },
            {"vocab_size": 4},
            {"vocab_size": 4, "pad_token_id": 3, "eos_token_id": 3},
        ),
        ({"pad_token_id": 40}, {"hidden_size": 4}, {"hidden_size": 4}),
    ],
)
def test_a_smaller_config_changes_exactly_the_fields_that_depend_on_the_sizes(
    defaults: dict[str, Any], fields: dict[str, Any], sizes: dict[str, int], changed: dict[str, Any]
) -> None:
    defaults.update(hidden_size=16)
    assert config(**fields).resized(sizes).config == {"model_type": "stand_in", **fields, **changed}


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_attention_heads": 6, "num_key_value_heads": 4}, "divide"),
    ],
)
def test_impossible_sizes_are_refused(defaults: dict[str, Any], sizes: dict[str, int], says: str) -> None:
    defaults.update(num_attention_heads=8, num_key_value_heads=2)
    with pytest.raises(ValueError, match=says):
        config().resized(sizes)


def test_token_ids_of_transformers_are_inside_a_smaller_vocabulary(defaults: dict[str, Any]) -> None:
    defaults.update(eos_token_id=90, bos_token_id=2)
    assert config().resized({"vocab_size": 10}).config["eos_token_id"] == 9
    assert "bos_token_id" not in config().resized({"vocab_size": 10}).config


@pytest.mark.parametrize(
    ("known", "fields"),
    [
        ({"hidden_size": 4096, "rms_norm_eps": 1e-5}, {"hidden_size": 32}),
        (
            {"num_hidden_layers": 6, "layer_types": [FULL, FULL, FULL, FULL, SLIDING, CONV], "others": [1, 2]},
            {"num_hidden_layers": 4, "layer_types": [FULL, FULL, SLIDING, CONV]},
        ),
        ({"num_hidden_layers": 3, "layer_types": [1, 1, 1]}, {"num_hidden_layers": 3, "layer_types": [1, 1, 1]}),
        (
            {"attention_dropout": 0.1, "resid_pdrop": 0.2, "router_jitter_noise": 0.3, "dropout": 1, "eps": 0.5},
            {"attention_dropout": 0.0, "resid_pdrop": 0.0, "router_jitter_noise": 0.0},
        ),
        (
            {"pad_token_id": None, "bos_token_id": 5, "eos_token_id": 6},
            {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
        ),
        ({"eos_token_id": 9}, {"eos_token_id": 2}),
        ({"kv_lora_rank": 5, "num_key_value_heads": 8}, {"kv_lora_rank": 12, "num_key_value_heads": 4}),
        ({"num_key_value_heads": 8}, {"num_key_value_heads": 2}),
        ({"kv_lora_rank": 5}, {"kv_lora_rank": 12}),
    ],
)  # fmt: skip
def test_an_example_has_small_sizes_of_the_fields_of_its_type(
    defaults: dict[str, Any], known: dict[str, Any], fields: dict[str, Any]
) -> None:
    defaults.update(known)
    assert example("stand_in").config == {"model_type": "stand_in", **fields}


def test_an_example_has_each_kind_of_layer_of_published_models(defaults: dict[str, Any]) -> None:
    defaults.update(num_hidden_layers=16, layer_types=[FULL] * 16)
    for kind in ("lfm2", "lfm2_moe"):
        assert example(kind).config["layer_types"] == ["conv", "conv", FULL, "conv"]
    assert example("other").config["layer_types"] == [FULL] * 4


def test_sizes_of_the_tiny_model_are_those_of_all_types() -> None:
    assert tiny().config == {
        "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "max_position_embeddings": 64,
        "tie_word_embeddings": False, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_experts": 4, "num_local_experts": 4,
        "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2, "moe_k": 2, "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24, "q_lora_rank": 16, "kv_lora_rank": 12, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16, "v_head_dim": 12, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
        "sliding_window": 8, "vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4,
    }  # fmt: skip


def test_the_fields_of_a_language_model_inside_a_larger_one_are_a_config_with_its_container() -> None:
    inside = {"model_type": "gemma3_text", "num_hidden_layers": 2, "hidden_size": 32}
    found = TransformersFormat().config_from_json({"model_type": "gemma3", "text_config": inside, "dtype": "float16"})
    assert found.container == "gemma3"
    assert inside.items() <= found.config.items()
    assert TransformersFormat().kept_fields({"a": 1}, found) == {}
    with pytest.raises(CheckpointError, match=r"^config\.json: hidden_size is 0; it must be at least 1$"):
        TransformersFormat().config_from_json({"model_type": "llama", "hidden_size": 0})
