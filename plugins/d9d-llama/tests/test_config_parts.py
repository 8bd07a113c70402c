"""Defaults, biases, rotated features and costs of the configs, the fields of their files, and the presets."""

from __future__ import annotations

from typing import Any

import pytest
from d9d_core.cost import Share
from d9d_core.errors import CheckpointError
from d9d_core.model import Stage
from d9d_llama import config as configs
from d9d_llama import hugging_face
from d9d_llama.config import GlmConfig, LlamaConfig, MistralConfig, Qwen2Config, stage_cost
from d9d_nn.decoder.costs import dense_cost
from d9d_nn.rope.scaling import Llama3Scaling
from pydantic import ValidationError

CLASSES: dict[str, Any] = {"Llama": LlamaConfig, "Mistral": MistralConfig, "Qwen2": Qwen2Config, "Glm": GlmConfig}
THREE = {"q_proj", "k_proj", "v_proj"}


def changed(family: str, **fields: Any) -> Any:
    tiny = getattr(configs, f"tiny_{family.lower()}")()
    return CLASSES[family].model_validate(tiny.model_dump() | fields)


def form_of(family: str) -> Any:
    return getattr(hugging_face, f"{family}HuggingFace")()


def test_the_tiny_models_have_the_defaults_of_their_family() -> None:
    found = {
        family: (one.intermediate_size, one.sliding_window, one.attention_bias, one.rope(0).features)
        for family, one in ((family, changed(family)) for family in CLASSES)
    }
    assert found == {
        "Llama": (48, None, False, None), "Mistral": (48, 4, False, None), "Qwen2": (48, None, True, None),
        "Glm": (48, None, True, 4),
    }  # fmt: skip


def test_projections_with_biases() -> None:
    assert changed("Qwen2").biased_projections() == THREE
    assert changed("Glm").biased_projections() == THREE
    assert changed("Glm", attention_bias=False).biased_projections() == frozenset()
    assert changed("Mistral").biased_projections() == frozenset()
    assert changed("Llama", attention_bias=True).biased_projections() > THREE


@pytest.mark.parametrize(
    ("head_dim", "share", "features"),
    [
        (8, 0.25, 2), (8, 1.0, 8), (8, 0.5, 4), (8, 0.3, 2), (16, 0.4, 6), (8, 0.125, None), (8, 0.375, None),
        (6, 0.1, None),
    ],
)  # fmt: skip
def test_a_share_of_a_head_rotates_in_pairs(head_dim: int, share: float, features: int | None) -> None:
    if features is not None:
        assert changed("Glm", head_dim=head_dim, partial_rotary_factor=share).rope(1).features == features
        return
    number = int(head_dim * share)
    with pytest.raises(ValidationError, match=f"{share:g} of head_dim = {head_dim} are {number} rotated features"):
        changed("Glm", head_dim=head_dim, partial_rotary_factor=share)


@pytest.mark.parametrize("family", CLASSES)
def test_costs_have_no_head_norms(family: str) -> None:
    config, share = changed(family), Share(2, 16, tensor=2)
    assert stage_cost(config, Stage(0, 2), share) == dense_cost(config, Stage(0, 2), share, head_norms=False)


@pytest.mark.parametrize(
    ("family", "heads", "absent"),
    [
        ("Llama", 4, {}),
        ("Mistral", 8, {"sliding_window": 4096}),
        ("Qwen2", 32, {}),
        ("Glm", 2, {"partial_rotary_factor": 0.5, "attention_bias": True}),
    ],
)
def test_absent_fields_have_the_defaults_of_transformers(family: str, heads: int, absent: dict[str, Any]) -> None:
    form = form_of(family)
    many = {"num_attention_heads": 32, "num_key_value_heads": 32, "hidden_size": 64} if heads > 4 else {}
    names = {"rope_theta", "rope_parameters", "rope_scaling", "tie_word_embeddings", "num_key_value_heads", "head_dim"}
    data = form.config_json(changed(family, **many), "float32")
    left = {name: value for name, value in data.items() if name not in names | absent.keys()}
    found = form.config_from_json(left)
    assert (found.rope_theta, found.tie_embeddings, found.num_key_value_heads) == (10_000.0, False, heads)
    assert found.head_dim == (64 // 32 if many else 32 // 4)
    assert {name: getattr(found, name) for name in absent} == absent
    stated = form.config_from_json(left | {"tie_word_embeddings": True, "num_key_value_heads": 2, "rope_theta": 5e4})
    assert (stated.rope_theta, stated.tie_embeddings, stated.num_key_value_heads) == (5e4, True, 2)


def test_fields_that_are_written() -> None:
    expected: dict[str, dict[str, Any]] = {
        "Llama": {"intermediate_size": 48, "attention_bias": False},
        "Mistral": {"intermediate_size": 48, "sliding_window": 4},
        "Qwen2": {"intermediate_size": 48, "use_sliding_window": False},
        "Glm": {"intermediate_size": 48, "attention_bias": True, "pad_token_id": None, "partial_rotary_factor": 0.5},
    }
    for family, fields in expected.items():
        data = form_of(family).config_json(changed(family), "float32")
        assert {name: data[name] for name in fields} == fields
        assert (data["model_type"], data["architectures"]) == (family.lower(), [f"{family}ForCausalLM"])
    plain = form_of("Glm").config_json(changed("Glm", partial_rotary_factor=0.25), "float32")
    assert plain["rope_parameters"]["partial_rotary_factor"] == 0.25
    assert not plain["rope_scaling"]
    scaling = Llama3Scaling(factor=8.0, original_max_positions=16, low_freq_factor=1.0, high_freq_factor=4.0)
    scaled = form_of("Glm").config_json(changed("Glm", rope_scaling=scaling), "float32")
    assert scaled["rope_scaling"]["partial_rotary_factor"] == 0.5
    alone = form_of("Mistral").config_json(changed("Mistral", sliding_window=None), "float32")
    assert form_of("Mistral").config_from_json(alone).sliding_window is None


def test_mistral_and_qwen2_state_biases_only_as_they_are() -> None:
    for family, wrong in (("Mistral", True), ("Qwen2", False)):
        data = form_of(family).config_json(changed(family), "float32")
        assert form_of(family).config_from_json(data | {"attention_bias": not wrong}) == changed(family)
        with pytest.raises(CheckpointError, match=f"attention_bias is {wrong}"):
            form_of(family).config_from_json(data | {"attention_bias": wrong})


def test_presets_have_the_published_positions_and_bases() -> None:
    names = ("vocab_size", "rope_theta", "rms_norm_eps", "max_positions", "tie_embeddings", "sliding_window")
    found = {
        (family, preset): tuple(getattr(kind.model_validate({"preset": preset}), name) for name in names)
        for family, kind in CLASSES.items()
        for preset in kind.presets
    }
    llama = (128_256, 500_000.0, 1e-5, 131_072)
    qwen = 1_000_000.0, 1e-6, 32_768
    assert found == {
        ("Llama", "1b"): (*llama, True, None), ("Llama", "3b"): (*llama, True, None),
        **{("Llama", size): (*llama, False, None) for size in ("8b", "70b", "405b")},
        ("Mistral", "7b"): (32_768, 1_000_000.0, 1e-5, 32_768, False, None),
        ("Mistral", "7b-v0.1"): (32_000, 10_000.0, 1e-5, 32_768, False, 4096),
        **{("Qwen2", size): (151_936, *qwen, True, None) for size in ("0.5b", "1.5b", "3b")},
        ("Qwen2", "7b"): (152_064, *qwen, False, None),
        **{("Qwen2", size): (152_064, 1_000_000.0, 1e-5, 32_768, False, None) for size in ("14b", "32b", "72b")},
        ("Glm", "4-9b"): (151_552, 10_000.0, 1.5625e-7, 131_072, False, None),
    }  # fmt: skip
    for preset in CLASSES["Llama"].presets:
        scaling = LlamaConfig.model_validate({"preset": preset}).rope_scaling
        assert scaling == Llama3Scaling(
            factor=32.0 if preset in ("1b", "3b") else 8.0, original_max_positions=8192, low_freq_factor=1.0,
            high_freq_factor=4.0,
        )  # fmt: skip


@pytest.mark.parametrize("share", [0, -0.5, 1.25])
def test_shares_out_of_range_are_refused(share: float) -> None:
    with pytest.raises(ValidationError, match="partial_rotary_factor"):
        changed("Glm", partial_rotary_factor=share)
