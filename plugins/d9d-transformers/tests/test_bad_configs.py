"""Configs that are misspelled, impossible, or of a newer release."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from d9d_core.errors import BuildError, CheckpointError
from d9d_core.model import Stage
from d9d_transformers import library
from d9d_transformers.build import build
from d9d_transformers.config import TransformersConfig, example
from d9d_transformers.hugging_face import TransformersFormat
from pydantic import ValidationError

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
NEWER = "99.1.0"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"model_type": 5}, "model_type is 5; it must be the name of a type"),
        ({"model_type": None}, "model_type is None"),
        ({"num_attention_heads": -4}, "num_attention_heads is -4; it must be at least 1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; it must be at least 1"),
        ({"vocab_size": 0}, "vocab_size is 0; it must be at least 1"),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3 does not divide num_attention_heads = 4"),
        ({"rms_norm_ep": 1e-5}, "rms_norm_ep is no field of llama, which has rms_norm_eps; correct its name"),
        ({"text_config": 3, "model_type": "gemma3"}, "transformers refuses it for gemma3"),
    ],
)
def test_a_config_json_that_no_model_has_is_refused_by_the_field(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        TransformersFormat().config_from_json(LLAMA | fields)


def test_a_misspelled_field_of_a_job_is_refused() -> None:
    with pytest.raises(CheckpointError, match="num_hiden_layers is no field of llama, which has num_hidden_layers"):
        build(TransformersConfig(config={"model_type": "llama", "num_hiden_layers": 2}), Stage())
    with pytest.raises(ValidationError, match="hidden_size is 0; it must be at least 1"):
        TransformersConfig(config={"model_type": "llama", "hidden_size": 0})


def test_an_activation_that_transformers_lacks_is_refused() -> None:
    with pytest.raises(
        BuildError, match="hidden_act is 'silou', which transformers does not have; use one such as .*silu"
    ):
        build(TransformersConfig(config=LLAMA | {"hidden_act": "silou"}), Stage())


def test_unknown_fields_of_a_newer_release_are_refused_and_others_are_read() -> None:
    form = TransformersFormat()
    with pytest.raises(CheckpointError, match=f"transformers {NEWER} wrote latent_heads, which the installed release"):
        form.config_from_json(LLAMA | {"latent_heads": 3, "transformers_version": NEWER})
    for stated in ({"latent_heads": None}, {"temperature": 0.6}, {"rope_theta": 1e4}, {"torch_dtype": "float32"}):
        form.config_from_json(LLAMA | stated | {"transformers_version": NEWER})
    for written in ("4.30.0", "unknown", None):
        form.config_from_json(LLAMA | {"latent_heads": 3, "transformers_version": written})


def test_unknown_fields_inside_a_larger_model_of_a_newer_release_are_refused() -> None:
    inside = example("gemma3_text").config
    whole: dict[str, Any] = {"model_type": "gemma3", "text_config": inside, "transformers_version": NEWER}
    TransformersFormat().config_from_json(whole)
    with pytest.raises(CheckpointError, match="wrote latent_heads"):
        TransformersFormat().config_from_json(whole | {"text_config": {**inside, "latent_heads": 3}})


def test_examples_of_all_types_have_known_fields_only() -> None:
    for kind in ("llama", "mixtral", "gpt_oss", "deepseek_v3", "gemma2", "phi3"):
        fields = example(kind).config
        assert library.unknown_fields(library.native_config(fields), fields) == []


def test_models_are_built_from_sound_configs() -> None:
    with torch.device("meta"):
        assert build(TransformersConfig(config=LLAMA), Stage()) is not None
