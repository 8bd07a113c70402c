"""Defaults and sizes of a gpt-oss config, the fields of its files, and its presets."""

from __future__ import annotations

from typing import Any

import pytest
from d9d_gpt_oss.config import GptOssConfig, tiny
from d9d_gpt_oss.hugging_face import GptOssHuggingFace
from d9d_gpt_oss.model import GptOss
from d9d_nn.rope.scaling import YarnScaling
from pydantic import ValidationError

FORM = GptOssHuggingFace()


def changed(**fields: Any) -> GptOssConfig:
    return GptOssConfig.model_validate(tiny().model_dump() | fields)


def test_defaults_and_the_tiny_model() -> None:
    needed = {
        "vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_positions": 64, "intermediate_size": 24, "num_experts": 8, "experts_per_token": 8,
    }  # fmt: skip
    config = GptOssConfig.model_validate(needed)
    defaults = {
        "rope_theta": 150_000.0, "local_rope_theta": None, "sliding_window": 128, "attention_bias": True,
        "rms_norm_eps": 1e-5, "swiglu_alpha": 1.702, "swiglu_limit": 7.0, "balancing": (), "capacity": None,
    }  # fmt: skip
    assert {name: getattr(config, name) for name in defaults} == defaults
    assert GptOssConfig.free_on_resume == {"balancing", "capacity"}
    small = tiny()
    assert (small.num_experts, small.experts_per_token, small.intermediate_size, small.sliding_window) == (8, 2, 24, 4)
    assert small.rope_scaling == YarnScaling(factor=8.0, original_max_positions=8, truncate=False)


def test_numbers_of_the_experts_and_the_router_that_a_token_uses() -> None:
    assert tiny().feed_forward_parameters(0) == 32 * 3 * 2 * 24 + 32 * 8


def test_the_parts_of_a_layer_are_what_the_config_says() -> None:
    config = changed(capacity=1.5, balancing=["z_loss"])
    layer = GptOss(config).layers["1"].ffn
    router = layer.router
    assert (router.experts, router.top_k, router.capacity) == (8, 2, 1.5)
    assert list(router.loss_terms()) != []
    shapes = {name: tuple(parameter.shape) for name, parameter in layer.named_parameters()}
    assert shapes == {
        "router.weight": (8, 32), "router.bias": (8,), "experts.gate_proj": (8, 32, 24), "experts.up_proj": (8, 32, 24),
        "experts.down_proj": (8, 24, 32), "experts.gate_bias": (8, 24), "experts.up_bias": (8, 24),
        "experts.down_bias": (8, 32),
    }  # fmt: skip


def test_fields_that_are_written() -> None:
    data = FORM.config_json(changed(attention_bias=False), "bfloat16")
    expected = {
        "intermediate_size": 24, "num_local_experts": 8, "sliding_window": 4, "num_experts_per_tok": 2, "head_dim": 8,
        "swiglu_alpha": 1.702, "swiglu_limit": 7.0, "attention_bias": False, "experts_per_token": 2,
        "layer_types": ["sliding_attention", "full_attention"], "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
    }  # fmt: skip
    assert {name: data[name] for name in expected} == expected
    assert FORM.own_fields(tiny()) == {}
    assert FORM.own_fields(changed(capacity=2.0)) == {"capacity": 2.0}
    assert list(FORM.own_fields(changed(balancing=["z_loss"]))) == ["balancing"]


def test_absent_fields_have_the_defaults_of_transformers() -> None:
    names = (
        "swiglu_alpha", "swiglu_limit", "head_dim", "sliding_window", "rms_norm_eps", "tie_word_embeddings",
        "initializer_range", "attention_bias", "rope_theta", "max_position_embeddings", "rope_scaling",
        "rope_parameters",
    )  # fmt: skip
    data = {name: value for name, value in FORM.config_json(tiny(), "bfloat16").items() if name not in names}
    found = FORM.config_from_json(data)
    expected = {
        "swiglu_alpha": 1.702, "swiglu_limit": 7.0, "head_dim": 64, "sliding_window": 128, "rms_norm_eps": 1e-5,
        "tie_embeddings": False, "attention_bias": True, "rope_theta": 150_000.0, "max_positions": 131_072,
        "rope_scaling": YarnScaling(factor=32.0, original_max_positions=4096, truncate=False),
    }  # fmt: skip
    assert {name: getattr(found, name) for name in expected} == expected
    assert found.initialization.std == 0.02


@pytest.mark.parametrize(
    ("absent", "fields"),
    [
        (("num_experts_per_tok",), {"experts_per_token": 3}),
        (("experts_per_token",), {"num_experts_per_tok": 3}),
        ((), {"experts_per_token": 3, "num_experts_per_tok": 3}),
        ((), {"experts_per_token": 3, "num_experts_per_tok": None}),
        ((), {"experts_per_token": None, "num_experts_per_tok": 3}),
        ((), {"experts_per_token": 3, "num_experts_per_tok": 3, "num_experts": 8, "quantization_config": None}),
        ((), {"experts_per_token": 3, "num_experts_per_tok": 3, "quantization_config": {"quant_method": "mxfp4"}}),
    ],
)
def test_either_name_of_a_number_of_experts_is_read(absent: tuple[str, ...], fields: dict[str, Any]) -> None:
    data = {name: value for name, value in FORM.config_json(tiny(), "bfloat16").items() if name not in absent}
    found = FORM.config_from_json(data | fields)
    assert (found.experts_per_token, found.num_experts) == (3, 8)


@pytest.mark.parametrize(("preset", "layers", "experts"), [("20b", 24, 32), ("120b", 36, 128)])
def test_presets_have_the_published_sizes(preset: str, layers: int, experts: int) -> None:
    config = GptOssConfig.model_validate({"preset": preset})
    expected = {
        "hidden_size": 2880, "intermediate_size": 2880, "num_layers": layers, "num_attention_heads": 64,
        "num_key_value_heads": 8, "vocab_size": 201_088, "head_dim": 64, "num_experts": experts, "experts_per_token": 4,
        "sliding_window": 128, "max_positions": 131_072,
        "rope_scaling": YarnScaling(factor=32.0, original_max_positions=4096, truncate=False),
    }  # fmt: skip
    assert {name: getattr(config, name) for name in expected} == expected


def test_the_smallest_sizes_are_accepted_and_smaller_ones_are_not() -> None:
    smallest = {"sliding_window": 1, "intermediate_size": 1, "num_experts": 1, "experts_per_token": 1}
    config = changed(**smallest)
    assert {name: getattr(config, name) for name in smallest} == smallest
    assert changed(rope_theta=1.5).rope_theta == 1.5
    for name in smallest:
        with pytest.raises(ValidationError, match=name):
            changed(**smallest | {name: 0})
    for fields in ({"rope_theta": 1.0}, {"rms_norm_eps": 0}, {"swiglu_alpha": float("inf")}):
        with pytest.raises(ValidationError, match=next(iter(fields))):
            changed(**fields)
