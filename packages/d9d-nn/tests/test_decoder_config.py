"""Configs of decoders: fields that depend on each other, presets, and ``config.json``."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import pytest
import torch
from d9d_core.errors import CheckpointError
from d9d_nn.decoder.config import DenseConfig
from d9d_nn.decoder.config_json import (
    check_computable,
    common_fields,
    common_json,
    flag,
    kept_fields,
    late_windows,
    late_windows_json,
)
from d9d_nn.decoder.format import DecoderFormat
from d9d_nn.decoder.presets import TINY, Presets, fill, sizes, sizes_or_preset
from d9d_nn.heads.token_classification import TokenClassificationHead
from d9d_weights.hugging_face.family import READ, Family
from pydantic import ValidationError

FAMILY = Family("dense", "Dense", {}, READ, {"special": (1,)})
SIZES: dict[str, Any] = {
    "vocab_size": 101, "hidden_size": 12, "num_layers": 3, "num_attention_heads": 3, "num_key_value_heads": 1,
    "intermediate_size": 10,
}  # fmt: skip


class Config(DenseConfig):
    """A dense decoder."""

    name: Literal["dense"] = "dense"
    presets: ClassVar[Presets] = {"small": sizes(12, 10, 3, 3, 1, vocab_size=101), "smaller": sizes(6, 4, 1, 3, 3)}


def config(**changes: Any) -> Config:
    return Config.model_validate({**SIZES, **changes})


def refusal(**changes: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        config(**changes)
    (line,) = caught.value.errors()
    return f"{line['loc'][0]}: {line['msg']}"


def test_a_config_has_the_documented_defaults() -> None:
    found = config().model_dump()
    assert {name: value for name, value in found.items() if name not in SIZES} == {
        "name": "dense",
        "preset": None,
        "pretrained": None,
        "added_tokens": 0,
        "head_dim": 4,
        "rope_theta": 1_000_000.0,
        "rope_scaling": None,
        "sliding_window": None,
        "sliding_from_layer": 0,
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
        "tie_embeddings": False,
        "max_positions": 32768,
        "initialization": found["initialization"],
        "heads": {"causal_lm": {"kind": "causal_lm"}},
        "attention_mask": "causal",
    }
    assert config(added_tokens=100).added_tokens == 100
    assert config(added_tokens={"images": 2, "tools": 1}).added_tokens == {"images": 2, "tools": 1}
    assert config(added_tokens={"added": 4}) == config(added_tokens=4)
    assert config(added_tokens={}) == config()
    assert config().feed_forward_parameters(0) == 360
    assert config().biased_projections() == frozenset()
    assert config(attention_bias=True).biased_projections() == {"q_proj", "k_proj", "v_proj", "o_proj"}
    slides = config(sliding_window=5, sliding_from_layer=1)
    assert [slides.window(layer) for layer in range(3)] == [None, 5, 5]
    assert [slides.kind(layer) for layer in range(3)] == [None, 5, 5]


@pytest.mark.parametrize(
    ("mask", "kind", "keys"),
    [("causal", "causal", 8), ("bidirectional", "bidirectional", 16), ("prefix", "blocks", 8), ("blocks", "blocks", 8)],
)
def test_costs_count_the_keys_of_each_attention_mask(mask: str, kind: str, keys: float) -> None:
    encoder = {"topic": {"kind": "classification", "num_classes": 2}}
    made = config(attention_mask=mask, **({"heads": encoder} if mask == "bidirectional" else {}))
    assert made.mask_kind() == kind
    assert made.attended_keys(0, 16) == keys
    causal = config(heads=made.heads)
    assert made.mixing_flops(0, 16) == causal.mixing_flops(0, 16) * keys / 8
    slides = made.model_copy(update={"sliding_window": 4})
    assert slides.attended_keys(0, 16) == slides.model_copy(update={"attention_mask": "causal"}).attended_keys(
        0, 16
    ) * (keys / 8)


def test_a_language_model_head_with_bidirectional_attention_is_refused() -> None:
    """It would see its targets."""
    with pytest.raises(
        ValidationError, match="the causal_lm head 'causal_lm' sees the tokens that it predicts; set heads"
    ):
        config(attention_mask="bidirectional")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"added_tokens": 101}, "added_tokens: Value error, 101 of vocab_size = 101 token ids leaves no regular token"),
        ({"added_tokens": {"a": 100, "b": 1}}, "added_tokens: Value error, 101 of vocab_size = 101 token ids leaves"),
        ({"added_tokens": {"regular": 1}}, "added_tokens: Value error, 'regular' cannot name a part"),
        ({"added_tokens": {"a.b": 1}}, "added_tokens: Value error, 'a.b' cannot name a part"),
        ({"added_tokens": {"a": 0}}, "added_tokens: Value error, a: 0 is not a positive number of token ids"),
        ({"added_tokens": -1}, "added_tokens: Value error, -1 is not greater than or equal to 0"),
        ({"num_key_value_heads": 2}, "num_key_value_heads: Value error, 2 does not divide num_attention_heads = 3"),
        ({"hidden_size": 13}, "head_dim: Value error, hidden_size = 13 is not a multiple of num_attention_heads = 3"),
        ({"head_dim": 5}, "head_dim: Value error, 5 is odd, but positions rotate pairs of features"),
        ({"hidden_size": 9}, "head_dim: Value error, 3 is odd, but positions rotate pairs of features"),
        ({"sliding_from_layer": 1}, "sliding_from_layer: Value error, 1 has no effect without sliding_window"),
        (
            {"sliding_window": 4, "sliding_from_layer": 3},
            "sliding_from_layer: Value error, 3 is not below num_layers = 3, so no layer has a sliding window",
        ),
        ({"heads": {}, "tie_embeddings": True}, "heads: "),
        ({"num_layers": 1025}, "num_layers: Input should be less than or equal to 1024"),
        ({"rope_theta": 1}, "rope_theta: Input should be greater than 1"),
    ],
)
def test_fields_that_do_not_fit_each_other_are_refused(changes: dict[str, Any], said: str) -> None:
    assert refusal(**changes).startswith(said)


def test_a_preset_fills_the_fields_that_are_not_given() -> None:
    found = Config.model_validate({"preset": "small", "num_layers": 5})
    assert (found.num_layers, found.hidden_size, found.intermediate_size, found.vocab_size) == (5, 12, 10, 101)
    assert (found.num_attention_heads, found.num_key_value_heads) == (3, 1)
    with pytest.raises(ValueError, match="pretrained defines the sizes; remove preset: small"):
        fill({"preset": "small", "pretrained": "x"}, Config.presets)
    with pytest.raises(ValueError, match=r"there is no preset 'smal'; did you mean 'small'\? presets: small, smaller"):
        fill({"preset": "smal"}, Config.presets)
    with pytest.raises(ValueError, match="there is no preset 'x'; presets: small, smaller"):
        fill({"preset": "x"}, Config.presets)
    for values in ({"preset": None}, {"preset": 3}, {}):
        assert fill(values, Config.presets) is values
    assert TINY == {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_positions": 64,
    }


def test_a_schema_takes_a_preset_or_all_sizes() -> None:
    schema: dict[str, Any] = {"required": ["a", "b"], "properties": {"preset": {}, "pretrained": {}, "a": {}}}
    sizes_or_preset(schema)
    assert schema["anyOf"] == [{"required": ["preset"]}, {"required": ["pretrained"]}, {"required": ["a", "b"]}]
    assert "required" not in schema


# --- config.json ------------------------------------------------------------------------------------------------------


def written(of: Config | None = None, dtype: str = "bfloat16", **ours: Any) -> dict[str, Any]:
    return common_json(of or config(), FAMILY, dtype, ours)


def test_a_config_is_written_in_the_fields_of_transformers() -> None:
    assert written() == {
        "architectures": ["DenseForCausalLM"],
        "model_type": "dense",
        "vocab_size": 101,
        "hidden_size": 12,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 1_000_000.0, "rope_type": "default"},
        "rope_theta": 1_000_000.0,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "initializer_range": config().initialization.std,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }
    with pytest.raises(CheckpointError, match="cannot state the dtype 'float64'; export one of float32, bfloat16, "):
        written(dtype="float64")


def test_scaled_positions_are_written_with_their_length() -> None:
    scaling = {"type": "dynamic", "factor": 2.0, "original_max_positions": 512}
    found = written(config(rope_scaling=scaling, max_positions=2048))
    assert (found["max_position_embeddings"], found["d9d"]) == (512, {"max_positions": 2048})
    assert found["rope_scaling"]["rope_type"] == "dynamic"
    assert "rope_theta" in found["rope_parameters"]
    linear = written(config(rope_scaling={"type": "linear", "factor": 2.0}, max_positions=2048))
    assert linear["max_position_embeddings"] == 2048
    assert "d9d" not in linear


def test_values_that_transformers_lacks_are_kept_in_a_field_of_our_own() -> None:
    heads = {"score": {"kind": "classification", "num_classes": 3, "pooling": "mean"}, "lm": {"kind": "causal_lm"}}
    found = written(config(heads=heads, added_tokens=4), more=1)
    assert found["d9d"] == {
        "heads": {
            "score": {"kind": "classification", "num_classes": 3, "pooling": "mean", "dropout": 0.0},
            "lm": {"kind": "causal_lm"},
        },
        "tie_embeddings": False,
        "added_tokens": 4,
        "more": 1,
    }
    assert found["architectures"] == ["DenseForCausalLM"]
    assert "id2label" not in found


@pytest.mark.parametrize(
    ("head", "architecture", "labels"),
    [
        ({"kind": "classification", "num_classes": 2}, "DenseForSequenceClassification", 2),
        ({"kind": "token_classification", "num_classes": 3}, "DenseForTokenClassification", 3),
        ({"kind": "embedding"}, "DenseModel", 0),
    ],
)
def test_the_architecture_is_the_class_of_the_published_head(
    head: dict[str, Any], architecture: str, labels: int
) -> None:
    found = written(config(heads={"h": head}))
    assert found["architectures"] == [architecture]
    if not labels:
        assert "id2label" not in found
        return
    assert found["id2label"] == {str(index): f"LABEL_{index}" for index in range(labels)}
    assert found["label2id"] == {f"LABEL_{index}": index for index in range(labels)}


def test_tokens_generation_and_names_of_unchanged_classes_are_kept() -> None:
    labels = {"id2label": {"0": "bad", "1": "good"}, "label2id": {"bad": 0, "good": 1}}
    source = {
        "temperature": 0.5, "bos_token_id": 7, "use_cache": False, "architectures": ["DenseForSequenceClassification"],
        **labels,
    }  # fmt: skip
    two = config(heads={"h": {"kind": "classification", "num_classes": 2}})
    three = config(heads={"h": {"kind": "classification", "num_classes": 3}})
    tags = config(heads={"h": {"kind": "token_classification", "num_classes": 2}})
    base = {"bos_token_id": 7, "temperature": 0.5}
    assert kept_fields(source, two, FAMILY) == {**base, **labels}
    assert list(kept_fields(source, two, FAMILY)) == ["bos_token_id", "id2label", "label2id", "temperature"]
    for other in (three, tags, config()):
        assert kept_fields(source, other, FAMILY) == base
    assert kept_fields({"temperature": 1}, two, FAMILY) == {"temperature": 1}


def test_what_our_models_do_not_compute_is_refused() -> None:
    check_computable({"model_type": "dense", "special": 1, "rope_scaling": None, "rope_parameters": {}}, FAMILY)
    for data, said in (
        ({"model_type": "other"}, "model_type is 'other', not 'dense'"),
        ({}, "model_type is None, not 'dense'"),
        ({"model_type": "dense", "rope_scaling": [1]}, "rope_scaling is .*; it must be a mapping or null"),
        ({"model_type": "dense", "rope_parameters": "x"}, "rope_parameters is 'x'; it must be a mapping or null"),
        ({"model_type": "dense", "special": 2}, "special"),
        ({"model_type": "dense", "unheard_of": 2}, "unheard_of"),
    ):
        with pytest.raises(CheckpointError, match=said):
            check_computable(data, FAMILY)


def data(**changes: Any) -> dict[str, Any]:
    return {**written(), "sliding_window": None, **changes}


def test_a_written_config_reads_back() -> None:
    assert common_fields(data(), FAMILY) == {
        "vocab_size": 101,
        "hidden_size": 12,
        "num_layers": 3,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "rope_scaling": None,
        "tie_embeddings": False,
        "max_positions": 32768,
        "initialization": {"std": config().initialization.std},
        "heads": {"causal_lm": {"kind": "causal_lm"}},
    }


def test_embeddings_are_tied_only_in_language_models_without_heads_of_ours() -> None:
    tied = {"tie_word_embeddings": True}
    assert common_fields(data(**tied), FAMILY)["tie_embeddings"] is True
    assert not common_fields(data(**tied, architectures=["DenseForSequenceClassification"]), FAMILY)["tie_embeddings"]
    ours = {"heads": {"a": {"kind": "causal_lm"}}}
    found = common_fields(data(**tied, d9d=ours), FAMILY)
    assert (found["tie_embeddings"], found["heads"]) == (False, ours["heads"])


@pytest.mark.parametrize(
    ("changes", "heads"),
    [
        ({"architectures": None}, {"causal_lm": {"kind": "causal_lm"}}),
        ({"architectures": "DenseModel"}, {"embedding": {"kind": "embedding"}}),
        (
            {"architectures": ["DenseForSequenceClassification"], "id2label": {"0": "a", "1": "b", "2": "c"}},
            {"classification": {"kind": "classification", "num_classes": 3}},
        ),
        (
            {"architectures": ["DenseForTokenClassification"], "num_labels": 4},
            {"token_classification": {"kind": "token_classification", "num_classes": 4}},
        ),
        (
            {"architectures": ["DenseForTokenClassification"]},
            {"token_classification": {"kind": "token_classification", "num_classes": 2}},
        ),
    ],
)
def test_heads_follow_from_the_architecture(changes: dict[str, Any], heads: Any) -> None:
    assert common_fields(data(**changes), FAMILY)["heads"] == heads


def test_an_unknown_architecture_lists_those_that_are_known() -> None:
    with pytest.raises(CheckpointError) as caught:
        common_fields(data(architectures=["Other"]), FAMILY)
    assert str(caught.value) == (
        "config.json: architecture Other is not one of dense; use one of DenseForCausalLM, "
        "DenseForSequenceClassification, DenseForTokenClassification, DenseModel"
    )


def test_the_base_of_rotations_is_read_as_transformers_reads_it() -> None:
    assert common_fields(data(rope_parameters=None, rope_theta=7.0), FAMILY)["rope_theta"] == 7.0
    assert common_fields(data(rope_parameters={"rope_theta": 5.0}, rope_theta=7.0), FAMILY)["rope_theta"] == 5.0
    scaled = {"rope_type": "linear", "factor": 2.0}
    both = data(rope_parameters={"rope_theta": 5.0}, rope_scaling=scaled, rope_theta=None)
    with pytest.raises(CheckpointError, match="transformers ignores rope_parameters, even its rope_theta = 5.0"):
        common_fields(both, FAMILY)
    assert common_fields({**both, "rope_theta": 7.0}, FAMILY)["rope_theta"] == 7.0
    both["rope_scaling"] = {**scaled, "rope_theta": 9.0}
    assert common_fields(both, FAMILY)["rope_theta"] == 9.0


def test_flags_are_true_false_or_absent() -> None:
    assert [flag({"x": value}, "x") for value in (True, False, None)] == [True, False, False]
    assert flag({}, "x") is False
    for value in (1, 0, "true"):
        with pytest.raises(CheckpointError, match="x is .*; it must be true or false"):
            flag({"x": value}, "x")


def test_windows_of_later_layers_are_written_and_read_back() -> None:
    assert late_windows_json(config()) == {
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": 3,
        "layer_types": ["full_attention"] * 3,
    }
    slides = late_windows_json(config(sliding_window=5, sliding_from_layer=1))
    assert slides == {
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    }
    assert late_windows({**slides, "num_hidden_layers": 3}, FAMILY) == (5, 1)


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({}, (None, 0)),
        ({"use_sliding_window": True}, (None, 0)),  # layer 28 is the first that would slide
        ({"use_sliding_window": True, "num_hidden_layers": 29}, (4096, 28)),
        ({"use_sliding_window": True, "max_window_layers": 2, "sliding_window": 9}, (9, 2)),
        ({"use_sliding_window": True, "max_window_layers": 3, "sliding_window": 9}, (None, 0)),
        ({"use_sliding_window": True, "max_window_layers": 0, "sliding_window": None}, (None, 0)),
        ({"max_window_layers": 2, "sliding_window": 9}, (None, 0)),
        ({"use_sliding_window": True, "sliding_window": 9, "layer_types": ["sliding_attention"] * 3}, (9, 0)),
        ({"use_sliding_window": True, "sliding_window": 9, "layer_types": ["full_attention"] * 3}, (None, 0)),
    ],
)
def test_windows_have_the_defaults_of_transformers(fields: dict[str, Any], found: tuple[int | None, int]) -> None:
    assert late_windows({"num_hidden_layers": 3, **fields}, FAMILY) == found


@pytest.mark.parametrize(
    "kinds",
    [
        ["sliding_attention", "full_attention", "sliding_attention"],
        ["full_attention", "sliding_attention"],
        ["full_attention", "other", "sliding_attention"],
    ],
)
def test_layers_that_slide_before_others_do_not_are_refused(kinds: list[str]) -> None:
    with pytest.raises(CheckpointError, match="full_attention first and sliding_attention after it"):
        late_windows({"num_hidden_layers": 3, "use_sliding_window": True, "layer_types": kinds}, FAMILY)


class Format(DecoderFormat[Config]):
    family = FAMILY
    config = Config

    def special_json(self, config: Config) -> dict[str, Any]:
        return {"intermediate_size": config.intermediate_size, "use_cache": False}

    def special_fields(self, data: Any) -> dict[str, Any]:
        return {"intermediate_size": data["intermediate_size"]}


def test_a_format_adds_the_fields_of_its_family() -> None:
    found = Format().config_json(config(), "float32")
    assert (found["intermediate_size"], found["use_cache"], found["dtype"]) == (10, False, "float32")
    assert Format().config_from_json(found) == config(head_dim=4)
    assert Format().kept_fields({"temperature": 1}, config()) == {"temperature": 1}
    assert Format().own_fields(config()) == {}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"vocab_size": None},
            "config.json: values are invalid for a dense model: vocab_size: Input should be a valid int",
        ),
        ({"intermediate_size": ...}, "config.json: intermediate_size is missing; take it from the config.json of the"),
        ({"d9d": {"heads": 3}}, "config.json: values are invalid for a dense model: heads: "),
        (
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "foo"}},
            "config.json: rope_parameters of rope_type 'foo' are unknown to d9d; it supports 'default', 'linear', ",
        ),
        ({"rope_parameters": 3}, "config.json: rope_parameters is 3; it must be a mapping or null"),
        (
            {"id2label": 3, "architectures": ["DenseForTokenClassification"]},
            "config.json: a value has a wrong type for a ",
        ),
    ],
)
def test_a_damaged_config_says_what_is_wrong(changes: dict[str, Any], said: str) -> None:
    found = {**Format().config_json(config(), "float32"), **changes}
    found = {name: value for name, value in found.items() if value is not ...}
    with pytest.raises(CheckpointError) as caught:
        Format().config_from_json(found)
    assert str(caught.value).startswith(said)


def test_a_head_of_tokens_classifies_each_position_in_float32() -> None:
    head = TokenClassificationHead(3, 2, std=0.5)
    assert head.std == 0.5
    assert head.bias.tolist() == [0.0, 0.0]
    assert head.weight.shape == (2, 3)
    assert head.weight.abs().sum() > 0
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[1.0, 2.0, 3.0], [0.0, 1.0, 0.0]]))
        head.bias.copy_(torch.tensor([10.0, 20.0]))
    found = head(torch.tensor([[[1.0, 0.0, 1.0], [0.0, 1.0, 0.0]]]))["class_logits"]
    assert found.tolist() == [[[14.0, 20.0], [12.0, 21.0]]]
    narrow = head.bfloat16()(torch.zeros(1, 1, 3, dtype=torch.bfloat16))["class_logits"]
    assert narrow.dtype == torch.float32
