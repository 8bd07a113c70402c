"""Fields of a Gemma config that follow from others, its costs, and the fields of its files."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from d9d_core.cost import Share
from d9d_core.model import Stage
from d9d_gemma.config import GemmaConfig, stage_cost, tiny
from d9d_gemma.hugging_face import GemmaHuggingFace
from d9d_gemma.model import GemmaBlock
from d9d_gemma.presets import PRESETS
from d9d_nn.decoder.costs import dense_cost
from pydantic import ValidationError

FORM = GemmaHuggingFace()
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_positions": 64, "intermediate_size": 48, "sliding_window": 4,
}  # fmt: skip


def changed(generation: Literal[2, 3], **fields: Any) -> GemmaConfig:
    return GemmaConfig.model_validate(tiny(generation).model_dump() | fields)


def test_defaults_and_the_tiny_models() -> None:
    config = GemmaConfig.model_validate(SIZES | {"head_dim": 20})
    assert (config.query_pre_attn_scalar, config.score_softcap, config.logit_softcap) == (20, None, None)
    assert (config.generation, config.tie_embeddings) == (3, True)
    for generation in (2, 3):
        small = tiny(generation)  # type: ignore[arg-type]
        assert (small.intermediate_size, small.sliding_window, small.query_pre_attn_scalar) == (48, 4, 24)
        assert (small.logit_softcap, small.generation) == (3.0, generation)
    assert (tiny(2).rope_theta, tiny(2).score_softcap, tiny(2).local_rope_theta) == (1e4, 2.0, None)
    assert (tiny().local_rope_theta, tiny().score_softcap) == (1e4, None)


@pytest.mark.parametrize(("scalar", "magnitude"), [(0, 1.0), (8, 1.0), (128, 0.5), (32, 0.5**0.5)])
def test_scores_are_divided_by_the_root_of_a_number_of_their_own(scalar: int, magnitude: float) -> None:
    config = changed(3, head_dim=8, query_pre_attn_scalar=scalar)
    assert config.rope(0).magnitude == pytest.approx(magnitude)
    assert config.query_pre_attn_scalar == (scalar or 8)


@pytest.mark.parametrize("generation", [2, 3])
@pytest.mark.parametrize("share", [Share(2, 16), Share(2, 16, tensor=2, width=4)])
def test_costs_have_output_norms_and_in_generation_3_head_norms(generation: Literal[2, 3], share: Share) -> None:
    config = changed(generation)
    expected = dense_cost(config, Stage(1, 2), share, head_norms=generation == 3, output_norms=True)
    assert stage_cost(config, Stage(1, 2), share) == expected
    assert expected != dense_cost(config, Stage(1, 2), share, head_norms=generation == 2, output_norms=True)


def test_blocks_have_the_parts_of_their_generation() -> None:
    second, third = (dict(GemmaBlock(changed(generation), 0).named_parameters()) for generation in (2, 3))
    assert third.keys() - second.keys() == {"attention.q_norm.weight", "attention.k_norm.weight"}
    assert not second.keys() - third.keys()


def written(generation: Literal[2, 3], *absent: str, **fields: Any) -> dict[str, Any]:
    data = FORM.config_json(changed(generation), "bfloat16")
    return {name: value for name, value in data.items() if name not in absent} | fields


@pytest.mark.parametrize(
    ("generation", "fields"),
    [(2, {"score_softcap": 50.0, "logit_softcap": 30.0}), (3, {"score_softcap": None, "logit_softcap": None})],
)
def test_absent_fields_have_the_defaults_of_transformers(generation: Literal[2, 3], fields: dict[str, Any]) -> None:
    absent = (
        "tie_word_embeddings", "head_dim", "query_pre_attn_scalar", "sliding_window", "attn_logit_softcapping",
        "final_logit_softcapping",
    )  # fmt: skip
    found = FORM.config_from_json(written(generation, *absent))
    expected = fields | {
        "tie_embeddings": True, "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096,
        "generation": generation,
    }  # fmt: skip
    assert {name: getattr(found, name) for name in expected} == expected


@pytest.mark.parametrize(("generation", "pattern"), [(2, 2), (3, 6)])
def test_without_layer_types_every_so_many_layers_are_full(generation: Literal[2, 3], pattern: int) -> None:
    data = written(generation, "layer_types", num_hidden_layers=12)
    found = FORM.config_from_json(data)
    assert [found.window(layer) is None for layer in range(12)] == [
        layer % pattern == pattern - 1 for layer in range(12)
    ]
    if generation == 3:
        other = FORM.config_from_json(data | {"sliding_window_pattern": 4})
        assert [other.window(layer) is None for layer in range(4)] == [False, False, False, True]


@pytest.mark.parametrize(("window", "stated"), [(3, 4), (4, 6), (5, 8)])
def test_files_state_windows_of_both_directions_together(window: int, stated: int) -> None:
    heads = {"topic": {"kind": "classification", "num_classes": 3}}
    plain: dict[str, Any] = {"heads": heads, "tie_embeddings": False, "sliding_window": window}
    config = changed(3, **plain, attention_mask="bidirectional")
    data = FORM.config_json(config, "float32")
    assert (data["sliding_window"], data["use_bidirectional_attention"]) == (stated, True)
    assert FORM.config_from_json(data) == config
    assert FORM.config_from_json(data | {"sliding_window": stated + 1}) == config
    causal = FORM.config_json(changed(3, **plain), "float32")
    assert causal["sliding_window"] == window
    assert not causal.get("use_bidirectional_attention")


def test_fields_that_are_written() -> None:
    for generation in (2, 3):
        data = written(generation)  # type: ignore[arg-type]
        expected = {
            "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "intermediate_size": 48,
            "query_pre_attn_scalar": 24, "sliding_window": 4, "final_logit_softcapping": 3.0, "attention_bias": False,
            "attn_logit_softcapping": 2.0 if generation == 2 else None, "pad_token_id": None,
            "model_type": "gemma2" if generation == 2 else "gemma3_text",
            "architectures": [f"Gemma{generation}ForCausalLM"],
        }  # fmt: skip
        assert {name: data[name] for name in expected} == expected
    assert FORM.example("gemma2") == tiny(2)
    assert FORM.example("gemma3_text") == tiny()


def test_presets_have_the_published_windows_positions_and_caps() -> None:
    names = ("generation", "vocab_size", "sliding_window", "max_positions", "query_pre_attn_scalar", "head_dim")
    found = {
        preset: tuple(getattr(GemmaConfig.model_validate({"preset": preset}), name) for name in names)
        for preset in PRESETS
    }
    assert found == {
        "2-2b": (2, 256_000, 4096, 8192, 256, 256), "2-9b": (2, 256_000, 4096, 8192, 256, 256),
        "2-27b": (2, 256_000, 4096, 8192, 144, 128), "3-270m": (3, 262_144, 512, 32_768, 256, 256),
        "3-1b": (3, 262_144, 512, 32_768, 256, 256), "3-4b": (3, 262_208, 1024, 131_072, 256, 256),
        "3-12b": (3, 262_208, 1024, 131_072, 256, 256), "3-27b": (3, 262_208, 1024, 131_072, 168, 128),
    }  # fmt: skip
    layers = GemmaConfig.model_validate({"preset": "3-4b"}).layer_types
    assert layers == ("sliding_attention",) * 5 + ("full_attention",)


@pytest.mark.parametrize(
    "fields",
    [
        {"query_pre_attn_scalar": -1},
        {"logit_softcap": 0},
        {"logit_softcap": float("inf")},
        {"score_softcap": 0},
        {"score_softcap": float("inf")},
    ],
)
def test_numbers_out_of_range_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(fields))):
        changed(2, **fields)
