"""Fields of configs that d9d refuses before a model is built, and the FLOPs of built models."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
from d9d_core.errors import BuildError
from d9d_core.model import Stage
from d9d_transformers.config import TransformersConfig
from d9d_transformers.flops import training_flops_per_token
from d9d_transformers.library import activations

module = import_module("d9d_transformers.build")


class Passed(Exception):
    """Raised in place of building a model: all fields passed."""


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> Any:
    def of(**fields: Any) -> None:
        def native(_: Any) -> Any:
            raise Passed

        known = SimpleNamespace(**fields, to_dict=lambda: fields)
        monkeypatch.setattr(module, "native_config", lambda _: known)
        monkeypatch.setattr(module, "native_model", native)
        module.build(TransformersConfig(config={"model_type": "stand_in"}), Stage())

    return of


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"hidden_act": "silu", "hidden_activation": None, "activation_function": "gelu_new"},
        {"hidden_act": 3},
        {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
        {"rope_parameters": {"full_attention": {"rope_type": "default"}, "sliding_attention": None}},
        {"attention_dropout": 0.0, "resid_pdrop": 0, "router_jitter_noise": None, "dropout_kind": "none"},
        {"other": 3},
    ],
)
def test_fields_that_pass(checked: Any, fields: dict[str, Any]) -> None:
    with pytest.raises(Passed):
        checked(**fields)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"hidden_act": "silou"}, "hidden_act is 'silou', which transformers does not have; use one such as .*silu"),
        ({"hidden_activation": "silou"}, "hidden_activation is 'silou'"),
        ({"activation_function": "gelu_neww"}, "activation_function is 'gelu_neww', .* use one such as gelu_new, "),
        ({"hidden_act": "?"}, f"hidden_act is '\\?', .*; use one such as {', '.join(sorted(activations())[:8])}$"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope_parameters has the type 'dynamic', whose angles depend"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}, "other": {"rope_type": "longrope"}}},
            "rope_parameters has the type 'longrope'",
        ),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1; .* set attention_dropout to 0 in config.json"),
        ({"resid_pdrop": 1}, "resid_pdrop is 1; "),
        ({"router_jitter_noise": 0.5}, "router_jitter_noise is 0.5; "),
    ],
)
def test_fields_that_are_refused(checked: Any, fields: dict[str, Any], text: str) -> None:
    with pytest.raises(BuildError, match=text):
        checked(**fields)


@pytest.mark.parametrize("length", [4, 100])
def test_flops_of_a_token(length: int) -> None:
    sizes: dict[str, Any] = {
        "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 96,
        "intermediate_size": 48, "num_hidden_layers": 2, "pad_token_id": 0, "sliding_window": 8,
    }  # fmt: skip
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    attention, head, each = 2 * 32 * (4 + 2) * 8, 32 * 96, 12 * 4 * 8
    dense = TransformersConfig(config={"model_type": "mistral", **sizes})
    seen = min(length, 8)
    assert training_flops_per_token(dense, length) == 6 * (2 * (attention + 3 * 32 * 48) + head) + 2 * each * seen
    mixed = TransformersConfig(config={"model_type": "mixtral", **sizes, **experts, "sliding_window": None})
    found = training_flops_per_token(mixed, length)
    assert found == 6 * (2 * (attention + 2 * 3 * 32 * 48) + head) + 2 * each * length
