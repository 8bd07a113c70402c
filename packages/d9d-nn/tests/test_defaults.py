"""Defaults and limits of the configs of tasks, heads, initialisation and rotary positions, and of ops."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from d9d_nn import costs
from d9d_nn.contrastive.config import EmbeddingConfig
from d9d_nn.decoder.model import DecoderModel
from d9d_nn.distillation.config import DistillationConfig
from d9d_nn.heads.config import ClassificationHeadConfig, EmbeddingHeadConfig, TokenClassificationHeadConfig
from d9d_nn.inference import config as inference
from d9d_nn.initialization import Initialization
from d9d_nn.linear import Linear
from d9d_nn.ops import linear_cross_entropy
from d9d_nn.ops.attention import block_sdpa, flex, sdpa
from d9d_nn.ops.attention.sdpa_pinned import CUDNN, EFFICIENT, FLASH
from d9d_nn.preference.config import DpoConfig
from d9d_nn.rms_norm import RMSNorm
from d9d_nn.rope.scaling import YarnScaling
from pydantic import BaseModel, ValidationError


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (EmbeddingConfig, {"temperature": 0.05, "symmetric": False}),
        (DistillationConfig, {"temperature": 1.0, "soft_weight": 1.0, "hard_weight": 0.0}),
        (DpoConfig, {"beta": 0.1, "normalize_length": False, "label_smoothing": 0.0}),
        (EmbeddingHeadConfig, {"normalize": True}),
        (Initialization, {"std": 0.02, "depth_scaled": True}),
        (YarnScaling, {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_configs_have_the_documented_defaults(config: type[BaseModel], expected: dict[str, Any]) -> None:
    found = {name: field.default for name, field in config.model_fields.items()}
    assert {name: value for name, value in found.items() if isinstance(value, int | float)} == expected


def test_inference_tasks_have_the_documented_defaults() -> None:
    found: dict[str, Any] = {}
    for config in vars(inference).values():
        if isinstance(config, type) and issubclass(config, BaseModel) and config.__module__ == inference.__name__:
            found |= {name: field.default for name, field in config.model_fields.items()}
    assert (found["layers"], found["max_new_tokens"], found["seed"]) == ((-1,), 128, 0)


@pytest.mark.parametrize(("config", "least"), [(ClassificationHeadConfig, 1), (TokenClassificationHeadConfig, 2)])
def test_classifiers_have_a_least_number_of_classes(config: Any, least: int) -> None:
    assert config(num_classes=least).num_classes == least
    with pytest.raises(ValidationError):
        config(num_classes=least - 1)


@pytest.mark.parametrize(
    ("config", "field", "accepted", "refused"),
    [
        (EmbeddingConfig, "temperature", 1e-9, 0),
        (DpoConfig, "beta", 1e-9, 0),
        (DpoConfig, "label_smoothing", 0.49, 0.5),
        (DpoConfig, "label_smoothing", 0, -1e-9),
        (Initialization, "std", 1e-9, 0),
        (Initialization, "std", 1.0, float("inf")),
    ],
)
def test_values_at_the_limits_are_accepted(config: Any, field: str, accepted: float, refused: float) -> None:
    assert getattr(config(**{field: accepted}), field) == accepted
    with pytest.raises(ValidationError):
        config(**{field: refused})


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (Linear.__init__, {"bias": False}),
        (RMSNorm.__init__, {"residual": False, "for_products": False}),
        (DecoderModel.__init__, {"heads": True}),
        (costs.linear, {"keeps_input": True}),
    ],
    ids=lambda value: getattr(value, "__qualname__", ""),
)
def test_calls_that_leave_out_an_argument_mean_the_documented_one(function: Any, expected: dict[str, Any]) -> None:
    parameters = inspect.signature(function).parameters.values()
    assert {one.name: one.default for one in parameters if isinstance(one.default, int)} == expected


def test_kernels_of_attention_have_the_limits_of_their_libraries() -> None:
    found = [
        (one.name, one.widest_head, one.head_multiple, one.grouped, one.masks) for one in (FLASH, CUDNN, EFFICIENT)
    ]
    assert found == [
        ("flash attention", 256, 8, True, False),
        ("cuDNN attention", 128, 8, True, True),
        ("memory-efficient attention", 65_536, 8, False, True),
    ]
    assert (block_sdpa.PRIORITY, flex.PRIORITY, sdpa._QUERIES_PRIORITY) == (20, 15, 20)
    assert (flex._WIDEST_HEAD, linear_cross_entropy.IGNORE) == (256, -100)
    assert linear_cross_entropy.KEPT_ELEMENTS == 134_217_728
    assert costs._KEPT_PART == linear_cross_entropy._KEPT_PART == 20
