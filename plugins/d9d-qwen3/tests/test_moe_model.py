from __future__ import annotations

import importlib
from math import prod
from typing import Any

import pytest
import torch
from d9d_core.errors import JobError
from d9d_core.job import JobFile
from d9d_core.model import Stage
from d9d_core.registry.registry import Registry
from d9d_moe.experts.layer import MoELayer
from d9d_nn.decoder.flops import training_flops_per_token
from d9d_nn.swiglu import SwiGLU
from d9d_qwen3.model import Qwen3
from d9d_qwen3.moe_config import Qwen3MoeConfig, tiny
from d9d_qwen3.presets import MOE_PRESETS
from d9d_testing.suites.fresh import import_fresh
from pydantic import ValidationError
from torch.utils.flop_counter import FlopCounterMode

#: Model cards: all parameters where the card's files count them; billions without embeddings and billions active.
PUBLISHED = {"30b-a3b": (30_532_122_624, 29.9, 3.3), "235b-a22b": (235_093_634_560, 234, 22)}


def changed(**fields: Any) -> Qwen3MoeConfig:
    return Qwen3MoeConfig.model_validate(tiny().model_dump() | fields)


@pytest.mark.thorough
@pytest.mark.parametrize("preset", MOE_PRESETS)
def test_a_preset_has_the_published_number_of_parameters(preset: str) -> None:
    config = Qwen3MoeConfig.model_validate({"preset": preset})
    with torch.device("meta"):
        model = Qwen3(config)
    sizes = {name: prod(p.shape) for name, p in model.named_parameters()}
    without = sum(size for name, size in sizes.items() if not name.startswith(("embedding", "heads")))
    total, billions, active = PUBLISHED[preset]
    assert sum(sizes.values()) == total
    assert round(without / 1e9, 1 if billions < 100 else 0) == billions
    # The embedding is no product, but counts as active there; their digits are cut off, not rounded.
    used = training_flops_per_token(config, 1) / 6 + sizes["embedding.weight"]
    assert used / 1e9 == pytest.approx(active, rel=0.02)


@pytest.mark.parametrize("preset", MOE_PRESETS)
def test_what_is_saved_reads_back_to_the_same_model(preset: str) -> None:
    config = Qwen3MoeConfig.model_validate({"preset": preset, "dense_layers": [3, 1], "num_layers": 5})
    assert config.dense_layers == (1, 3)
    assert not config.tie_embeddings  # in all published models with experts
    assert Qwen3MoeConfig.model_validate(config.model_dump(mode="json")) == config


CHANGES: dict[str, dict[str, Any]] = {
    "experts": {},
    "dense layers": {"num_layers": 3, "dense_layers": [0, 2], "intermediate_size": 40},
    "tied": {"tie_embeddings": True},
    "balanced": {"balancing": [{"name": "auxiliary_loss", "coefficient": 0.1}, {"name": "bias_update"}]},
}


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_flops_are_what_a_step_executes(changes: dict[str, Any]) -> None:
    config, length = changed(**changes), 16
    torch.manual_seed(0)
    model, tokens = Qwen3(config), torch.randint(config.vocab_size, (2, length))
    with FlopCounterMode(display=False) as counter:
        model(tokens=tokens, targets=tokens)["token_loss"].sum().backward()
    # The reference computes the whole square of attention, the formula counts its causal half.
    half = 6 * config.num_layers * config.num_attention_heads * config.head_dim * length
    assert counter.get_total_flops() / tokens.numel() == training_flops_per_token(config, length) + half


def test_dense_layers_have_one_feed_forward_layer_of_their_own_size() -> None:
    model = Qwen3(changed(num_layers=3, dense_layers=[1], intermediate_size=40))
    kinds = [type(layer.ffn) for layer in model.layers.values()]
    assert kinds == [MoELayer, SwiGLU, MoELayer]
    assert model.layers["1"].ffn.down_proj.weight.shape == (32, 40)
    assert model.layers["2"].ffn.experts.down_proj.shape == (8, 24, 32)


def test_a_dense_layer_is_as_large_as_the_experts_of_a_token_unless_given() -> None:
    assert changed(intermediate_size=0).intermediate_size == tiny().experts_per_token * tiny().moe_intermediate_size


@pytest.mark.parametrize("missing", ["experts_per_token", "moe_intermediate_size"])
def test_a_size_that_experts_need_is_asked_for(missing: str) -> None:
    values = tiny().model_dump() | {"intermediate_size": 0}
    del values[missing]
    with pytest.raises(ValidationError) as caught:
        Qwen3MoeConfig.model_validate(values)
    assert [error["loc"] for error in caught.value.errors()] == [(missing,)]


def test_parameters_keep_their_names_on_any_stage() -> None:
    stages = [Qwen3(tiny(), Stage(index, 2)) for index in range(2)]
    names = {name for stage in stages for name, _ in stage.named_parameters()}
    assert names == dict(Qwen3(tiny()).named_parameters()).keys()
    assert {name for name in names if name.startswith("layers.1.ffn.")} == {
        "layers.1.ffn.router.weight",
        *(f"layers.1.ffn.experts.{matrix}" for matrix in ("gate_proj", "up_proj", "down_proj")),
    }


def test_experts_start_like_dense_layers() -> None:
    torch.manual_seed(0)
    experts = Qwen3(changed(num_layers=8, hidden_size=64)).layers["0"].ffn.experts
    assert experts.gate_proj.std().item() == pytest.approx(0.02, rel=0.1)
    assert experts.down_proj.std().item() == pytest.approx(0.02 / 4, rel=0.1)


def test_routers_are_what_the_config_says() -> None:
    router = (
        Qwen3(changed(experts_per_token=3, renormalise=False, capacity=1.5, balancing=[{"name": "bias_update"}]))
        .layers["1"]
        .ffn.router
    )
    assert (router.experts, router.top_k, router.renormalise, router.capacity) == (8, 3, False, 1.5)
    assert "layers.1.ffn.router.selection_bias" in Qwen3(changed(balancing=[{"name": "bias_update"}])).state_dict()
    assert "layers.1.ffn.router.selection_bias" not in Qwen3(tiny()).state_dict()


@pytest.mark.parametrize(
    ("changes", "field", "text"),
    [
        ({"experts_per_token": 9}, "experts_per_token", "9 is more than num_experts = 8; give at most 8"),
        ({"num_experts": 0}, "num_experts", "greater than 0"),
        ({"dense_layers": [2]}, "dense_layers", "there is no layer 2 in a model of 2 layers; give 0 to 1"),
        ({"dense_layers": [-1]}, "dense_layers", "there is no layer -1 in a model of 2"),
        ({"dense_layers": [1, 1]}, "dense_layers", "layer 1 appears twice"),
        ({"dense_layers": [0, 1]}, "dense_layers", "all 2 layers are dense, none has experts; use the model qwen3"),
        ({"balancing": [{"name": "z_loss"}, {"name": "z_loss"}]}, "balancing", "z_loss appears twice; keep one"),
        ({"balancing": [{"name": "luck"}]}, "balancing", "there are: auxiliary_loss, z_loss, bias_update"),
        ({"capacity": 0}, "capacity", "greater than 0"),
        ({"sliding_from_layer": 1}, "sliding_from_layer", "not a field of"),
        ({"expert_files": "apart"}, "expert_files", "'per_expert' or 'fused'"),
    ],
)
def test_impossible_configs_are_refused_where_they_are_wrong(changes: dict[str, Any], field: str, text: str) -> None:
    with pytest.raises(ValidationError) as error:
        changed(**changes)
    (line,) = error.value.errors()
    assert line["loc"][0] == field
    assert text in line["msg"]


def test_a_config_is_checked_and_its_flops_counted_without_torch() -> None:
    facts = import_fresh("d9d_qwen3.moe_config", "d9d_nn.decoder.flops")
    assert "torch" not in facts["d9d_qwen3.moe_config"].modules | facts["d9d_nn.decoder.flops"].modules


def job(model: dict[str, Any]) -> JobFile:
    values = {
        "model": {"name": "qwen3_moe", **model},
        "task": "causal_lm",
        "data": "toy_tokens",
        "optimizer": "toy_optimizer",
        "steps": 1,
    }
    names = ("d9d_moe.plugin", "d9d_nn.plugin", "d9d_testing.toy.plugin", "d9d_qwen3.plugin")
    return JobFile.from_values(values, registry=Registry.of(*map(importlib.import_module, names)))


def test_a_job_file_names_a_preset_and_the_resolved_job_holds_all_sizes() -> None:
    given = job({"preset": "30b-a3b", "num_layers": 3, "balancing": [{"name": "bias_update", "rate": 0.01}]})
    resolved = given.resolved()["model"]
    assert resolved.items() >= {**MOE_PRESETS["30b-a3b"], "num_layers": 3}.items()
    assert job(resolved).model == given.model


def test_presets_are_those_of_this_model() -> None:
    with pytest.raises(JobError, match=r"^job: model: there is no preset '8b'; presets: 30b-a3b, 235b-a22b"):
        job({"preset": "8b"})
