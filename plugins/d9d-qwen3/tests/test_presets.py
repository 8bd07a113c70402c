from __future__ import annotations

import importlib
from math import prod
from typing import Any

import pytest
import torch
from d9d_core.errors import JobError
from d9d_core.job import JobFile
from d9d_core.registry.registry import Registry
from d9d_nn.decoder.flops import training_flops_per_token
from d9d_qwen3.config import Qwen3Config
from d9d_qwen3.model import Qwen3
from d9d_qwen3.presets import PRESETS
from d9d_testing.suites.fresh import import_fresh
from pydantic import ValidationError

#: Model cards: all parameters where the card's files count them, and billions without embeddings, rounded as there.
PUBLISHED = {
    "0.6b": (596_049_920, 0.44),
    "1.7b": (1_720_574_976, 1.4),
    "4b": (4_022_468_096, 3.6),
    "8b": (8_190_735_360, 6.95),
    "14b": (14_768_307_200, 13.2),
    "32b": (32_762_123_264, 31.2),
}


@pytest.mark.thorough
@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_has_the_published_number_of_parameters(preset: str) -> None:
    with torch.device("meta"):
        model = Qwen3(Qwen3Config(preset=preset))  # type: ignore[call-arg]
    sizes = {name: prod(p.shape) for name, p in model.named_parameters()}
    without = sum(size for name, size in sizes.items() if not name.startswith(("embedding", "heads")))
    total, billions = PUBLISHED[preset]
    assert sum(sizes.values()) == total
    digits = len(str(billions).partition(".")[2])
    assert round(without / 1e9, digits) == billions


@pytest.mark.parametrize("preset", PRESETS)
def test_flops_of_a_preset_are_six_per_parameter_of_a_product(preset: str) -> None:
    config = Qwen3Config(preset=preset)  # type: ignore[call-arg]
    words = config.vocab_size * config.hidden_size
    expected = PUBLISHED[preset][0] - (0 if config.tie_embeddings else words)
    assert training_flops_per_token(config, 1) / 6 == pytest.approx(expected, rel=1e-3)


def test_given_fields_win_over_the_preset() -> None:
    config = Qwen3Config.model_validate({"preset": "8b", "num_layers": 2, "rope_theta": 5e5})
    assert (config.num_layers, config.rope_theta, config.hidden_size) == (2, 5e5, 4096)


@pytest.mark.parametrize("preset", PRESETS)
def test_what_is_saved_reads_back_to_the_same_model(preset: str) -> None:
    config = Qwen3Config.model_validate({"preset": preset, "max_positions": 32_768})
    saved = config.model_dump(mode="json")
    assert Qwen3Config.model_validate(saved) == config
    assert saved.items() >= {**PRESETS[preset], "max_positions": 32_768}.items()


@pytest.mark.parametrize(
    ("preset", "text"),
    [
        ("0_6b", "there is no preset '0_6b'; did you mean '0.6b'. presets: 0.6b, 1.7b, 4b, 8b, 14b, 32b"),
        ("235b-a22b", "there is no preset '235b-a22b'; presets: 0.6b,"),
        (8, "valid string"),
        (["8b"], "valid string"),
    ],
)
def test_an_unknown_preset_names_those_there_are(preset: Any, text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        Qwen3Config.model_validate({"preset": preset})


def test_without_preset_sizes_are_asked_for() -> None:
    with pytest.raises(ValidationError, match="missing; 'qwen3' needs it"):
        Qwen3Config.model_validate({"vocab_size": 8})


def test_editors_accept_a_preset_in_place_of_sizes() -> None:
    schema = Qwen3Config.model_json_schema()
    assert "required" not in schema
    *sources, sizes = [alternative["required"] for alternative in schema["anyOf"]]
    assert ["preset"] in sources
    assert {"vocab_size", "hidden_size", "num_layers"} <= set(sizes)


def test_presets_load_without_torch() -> None:
    assert "torch" not in import_fresh("d9d_qwen3.presets")["d9d_qwen3.presets"].modules


def job(model: dict[str, Any]) -> JobFile:
    values = {
        "model": {"name": "qwen3", **model},
        "task": "causal_lm",
        "data": "toy_tokens",
        "optimizer": "toy_optimizer",
        "steps": 1,
    }
    plugins = (
        importlib.import_module(name) for name in ("d9d_nn.plugin", "d9d_testing.toy.plugin", "d9d_qwen3.plugin")
    )
    return JobFile.from_values(values, registry=Registry.of(*plugins))


def test_a_job_file_names_a_preset_and_the_resolved_job_holds_all_sizes() -> None:
    given = job({"preset": "1.7b", "num_layers": 3})
    resolved = given.resolved()
    assert resolved["model"].items() >= {**PRESETS["1.7b"], "num_layers": 3}.items()
    model = {name: value for name, value in resolved["model"].items() if name != "preset"}
    again = job(model)
    assert again.resolved()["model"] == {**resolved["model"], "preset": None}
    assert job(resolved["model"]).model == given.model


def test_a_job_with_an_unknown_preset_is_refused_at_its_place() -> None:
    with pytest.raises(JobError, match="^job: model: there is no preset '8bb'; did you mean '8b'"):
        job({"preset": "8bb"})


@pytest.mark.parametrize("preset", PRESETS)
def test_sizes_of_a_preset_add_up_to_the_published_number_of_parameters(preset: str) -> None:
    config = Qwen3Config(preset=preset)  # type: ignore[call-arg]
    hidden, head = config.hidden_size, config.head_dim
    attention = 2 * hidden * head * (config.num_attention_heads + config.num_key_value_heads) + 2 * head
    layer = attention + 3 * hidden * config.intermediate_size + 2 * hidden
    tables = config.vocab_size * hidden * (1 if config.tie_embeddings else 2)
    assert config.num_layers * layer + tables + hidden == PUBLISHED[preset][0]
