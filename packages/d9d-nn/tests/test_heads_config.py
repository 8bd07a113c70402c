from __future__ import annotations

import pytest
from d9d_nn.heads.config import (
    CausalLMHeadConfig,
    ClassificationHeadConfig,
    EmbeddingHeadConfig,
    Heads,
    check_heads,
    head_layers,
)
from d9d_testing.suites.fresh import import_fresh
from pydantic import TypeAdapter, ValidationError

LM, CLASSES = CausalLMHeadConfig(), ClassificationHeadConfig(num_classes=3)


@pytest.mark.thorough
def test_configs_of_heads_load_without_torch() -> None:
    facts = import_fresh("d9d_nn.heads.config", "d9d_nn.classification.config")
    assert "torch" not in facts["d9d_nn.heads.config"].modules | facts["d9d_nn.classification.config"].modules


def test_the_kind_selects_the_config() -> None:
    read = TypeAdapter(Heads).validate_python(
        {"a": {"kind": "causal_lm"}, "b": {"kind": "classification", "num_classes": 3}, "c": {"kind": "embedding"}}
    )
    assert read == {"a": LM, "b": CLASSES, "c": EmbeddingHeadConfig()}


@pytest.mark.parametrize(
    ("heads", "text"),
    [
        ({}, "at least 1"),
        ({"a": {"kind": "causal"}}, "'causal_lm', 'classification', 'token_classification', 'embedding'"),
        ({"a": {"num_classes": 3}}, "kind"),
        ({"a.b": {"kind": "causal_lm"}}, "pattern"),
        ({"a/b": {"kind": "causal_lm"}}, "pattern"),
        ({"a": {"kind": "classification"}}, "num_classes"),
        ({"a": {"kind": "classification", "num_classes": 0}}, "greater than or equal to 1"),
        ({"a": {"kind": "classification", "num_clases": 2}}, "did you mean 'num_classes'"),
        ({"a": {"kind": "embedding", "layers": []}}, "at least 1"),
        ({"a": {"kind": "embedding", "pooling": "max"}}, "'last', 'first', 'mean' or 'masked'"),
        ({"a": {"kind": "classification", "num_classes": 2, "dropout": 1.0}}, "less than 1"),
        ({"a": {"kind": "embedding", "projection": 0}}, "greater than 0"),
        ({"a": {"kind": "hidden_states", "aggregation": "none"}}, "give layers, or remove aggregation"),
        ({"a": {"kind": "hidden_states", "layers": [0], "aggregation": "sum"}}, "'mean' or 'none'"),
    ],
)
def test_impossible_heads_are_refused(heads: dict, text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        TypeAdapter(Heads).validate_python(heads)


def test_layers_count_from_either_end() -> None:
    assert head_layers(LM, 4) is None
    assert head_layers(CLASSES, 4) is None
    assert head_layers(EmbeddingHeadConfig(layers=[-1, 0]), 4) == (0, 3)


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        ([4], "a.layers: there is no layer 4 in a model of 4 layers; give -4 to 3"),
        ([-5], "there is no layer -5"),
        ([3, -1], "layer 3 appears twice"),
    ],
)
def test_layers_that_do_not_exist_or_appear_twice_are_refused(layers: list[int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        check_heads({"a": EmbeddingHeadConfig(layers=layers)}, hidden_size=8, num_layers=4, tied=False)


def test_an_embedding_has_no_more_features_than_the_model() -> None:
    check_heads({"a": EmbeddingHeadConfig(dim=8)}, hidden_size=8, num_layers=4, tied=False)
    with pytest.raises(ValueError, match="a.dim: 9 is more than hidden_size = 8"):
        check_heads({"a": EmbeddingHeadConfig(dim=9)}, hidden_size=8, num_layers=4, tied=False)
    check_heads({"a": EmbeddingHeadConfig(dim=9, projection=9)}, hidden_size=8, num_layers=4, tied=False)
    with pytest.raises(ValueError, match="a.dim: 8 is more than projection = 4; give at most 4"):
        check_heads({"a": EmbeddingHeadConfig(dim=8, projection=4)}, hidden_size=8, num_layers=4, tied=False)


def test_ties_need_exactly_one_language_model_head() -> None:
    check_heads({"lm": LM, "topic": CLASSES}, hidden_size=8, num_layers=4, tied=True)
    with pytest.raises(ValueError, match="the model has no causal_lm head; set tie_embeddings to false or add"):
        check_heads({"topic": CLASSES}, hidden_size=8, num_layers=4, tied=True)
    with pytest.raises(ValueError, match=r"the model has 2 causal_lm heads \(a, b\)"):
        check_heads({"a": LM, "b": LM}, hidden_size=8, num_layers=4, tied=True)
