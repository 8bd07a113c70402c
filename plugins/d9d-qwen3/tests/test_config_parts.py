"""Defaults, boundaries and sizes of the configs of Qwen3, stated by hand."""

from __future__ import annotations

from typing import Any

import pytest
from d9d_core.cost import Share
from d9d_core.errors import CheckpointError
from d9d_core.model import Stage
from d9d_moe.costs import mixture
from d9d_nn.decoder.costs import dense_cost, swiglu_cost
from d9d_qwen3.config import Qwen3Config
from d9d_qwen3.config import tiny as tiny_dense
from d9d_qwen3.costs import feed_forward, stage_cost
from d9d_qwen3.hugging_face.moe import Qwen3MoeHuggingFace
from d9d_qwen3.moe_config import Qwen3MoeConfig, tiny
from d9d_qwen3.presets import MOE_PRESETS, PRESETS
from pydantic import ValidationError

UPDATE = {"name": "bias_update", "rate": 0.01}


def changed(**fields: Any) -> Qwen3MoeConfig:
    sizes = {name: value for name, value in tiny().model_dump().items() if name != "intermediate_size"}
    return Qwen3MoeConfig.model_validate(sizes | fields)


def test_defaults_and_the_tiny_models() -> None:
    config = tiny()
    expected = {
        "num_experts": 8, "experts_per_token": 2, "moe_intermediate_size": 24, "renormalise": True, "dense_layers": (),
        "intermediate_size": 48, "balancing": (), "capacity": None, "expert_files": "per_expert",
    }  # fmt: skip
    assert {name: getattr(config, name) for name in expected} == expected
    assert tiny_dense().intermediate_size == 48
    assert Qwen3MoeConfig.free_on_resume == {"balancing", "capacity", "expert_files"}


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"experts_per_token": 8}, {"intermediate_size": 192}),
        ({"intermediate_size": 7}, {"intermediate_size": 7}),
        ({"intermediate_size": 0}, {"intermediate_size": 48}),
        ({"num_layers": 4, "dense_layers": (3, 0, 1)}, {"dense_layers": (0, 1, 3)}),
        ({"num_layers": 1}, {"dense_layers": ()}),
    ],
)
def test_sizes_at_their_boundaries_are_accepted(fields: dict[str, Any], found: dict[str, Any]) -> None:
    config = changed(**fields)
    assert {name: getattr(config, name) for name in found} == found


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"experts_per_token": 9}, "9 is more than num_experts = 8; give at most 8"),
        ({"num_layers": 4, "dense_layers": (1, 0, 1)}, "layer 1 appears twice; name each layer once"),
        ({"dense_layers": (2,)}, "there is no layer 2 in a model of 2 layers; give 0 to 1"),
        ({"dense_layers": (-1,)}, "there is no layer -1 in a model of 2 layers; give 0 to 1"),
        ({"dense_layers": (1, 0)}, "all 2 layers are dense, none has experts; use the model qwen3"),
        ({"num_layers": None, "dense_layers": (5,)}, "num_layers"),
        ({"num_layers": None, "dense_layers": (5, 5)}, "layer 5 appears twice"),
        ({"num_experts": None, "experts_per_token": 9}, "num_experts"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size"),
        ({"experts_per_token": None}, "experts_per_token"),
        ({"intermediate_size": -1}, "greater than or equal to 0"),
    ],
)
def test_impossible_sizes_are_refused(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        changed(**fields)


def test_layers_are_dense_or_have_experts() -> None:
    config = changed(num_layers=3, dense_layers=(1,), intermediate_size=40)
    assert [config.has_experts(layer) for layer in range(3)] == [True, False, True]
    assert [config.kind(layer) for layer in range(3)] == [(None, True), (None, False), (None, True)]
    assert config.feed_forward_parameters(1) == 3 * 32 * 40
    assert config.feed_forward_parameters(2) == 32 * 3 * 2 * 24 + 32 * 8
    assert changed(sliding_window=4).kind(1) == (4, True)


def test_a_selection_bias_belongs_to_bias_update() -> None:
    none, loss, update = changed(), changed(balancing=["z_loss"]), changed(balancing=["z_loss", UPDATE])
    assert [config.has_selection_bias for config in (none, loss, update)] == [False, False, True]
    saved = [{}, {"balancing": [{"name": "z_loss"}]}, {"balancing": [{"name": "z_loss"}, UPDATE]}]
    for config in (none, loss):
        for before in saved[:2]:
            config.check_resume(before)
        with pytest.raises(
            ValueError, match="the checkpoint has a selection_bias in each router, which this model lacks"
        ):
            config.check_resume(saved[2])
    update.check_resume(saved[2])
    for before in saved[:2]:
        with pytest.raises(ValueError, match="the checkpoint lacks the selection_bias that bias_update updates"):
            update.check_resume(before)


@pytest.mark.parametrize("share", [Share(2, 16), Share(2, 16, tensor=2, experts=2, width=4)])
def test_costs_of_feed_forward_layers(share: Share) -> None:
    config = changed(num_layers=3, dense_layers=(1,), experts_per_token=3)
    assert feed_forward(config, 0, share) == mixture(share, 32, 24, 8, 3)
    assert feed_forward(config, 1, share) == swiglu_cost(config, 1, share)
    dense = tiny_dense()
    alone = Share(2, 16, tensor=share.tensor)
    assert stage_cost(dense, Stage(1, 2), alone) == dense_cost(dense, Stage(1, 2), alone, head_norms=True)
    names = [op.name for block in stage_cost(config, Stage(), share).blocks for op in block.ops]
    assert names.count("head norms, rope") == 2  # layers with experts, and the dense one


def test_presets_have_the_published_sizes() -> None:
    common = {
        "vocab_size": 151_936, "head_dim": 128, "rope_theta": 1_000_000.0, "rms_norm_eps": 1e-6,
        "max_positions": 40_960,
    }  # fmt: skip
    names = ("hidden_size", "intermediate_size", "num_layers", "num_attention_heads", "num_key_value_heads")
    found: dict[str, tuple[Any, ...]] = {}
    for kind in (Qwen3Config, Qwen3MoeConfig):
        for preset in kind.presets:
            config = kind.model_validate({"preset": preset})
            assert {name: getattr(config, name) for name in common} == common
            found[preset] = *(getattr(config, name) for name in names), config.tie_embeddings
            if isinstance(config, Qwen3MoeConfig):
                found[preset] += config.moe_intermediate_size, config.num_experts, config.experts_per_token
    assert found == {
        "0.6b": (1024, 3072, 28, 16, 8, True), "1.7b": (2048, 6144, 28, 16, 8, True),
        "4b": (2560, 9728, 36, 32, 8, True), "8b": (4096, 12288, 36, 32, 8, False),
        "14b": (5120, 17408, 40, 40, 8, False), "32b": (5120, 25600, 64, 64, 8, False),
        "30b-a3b": (2048, 6144, 48, 32, 4, False, 768, 128, 8),
        "235b-a22b": (4096, 12288, 94, 64, 4, False, 1536, 128, 8),
    }  # fmt: skip
    assert found.keys() == PRESETS.keys() | MOE_PRESETS.keys()


def test_the_smallest_sizes_are_accepted_and_smaller_ones_are_not() -> None:
    smallest = {"num_experts": 1, "experts_per_token": 1, "moe_intermediate_size": 1}
    assert changed(**smallest).intermediate_size == 1
    for name in smallest:
        with pytest.raises(ValidationError, match=name):
            changed(**smallest | {name: 0})
    for capacity in (0, -1.0, float("inf")):
        with pytest.raises(ValidationError, match="capacity"):
            changed(capacity=capacity)


FILE: dict[str, Any] = {
    "intermediate_size": 1, "moe_intermediate_size": 2, "num_experts_per_tok": 3, "num_experts": 4,
    "num_hidden_layers": 6,
}  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "changed_fields"),
    [
        ({}, {}),
        ({"norm_topk_prob": True, "mlp_only_layers": None}, {"renormalise": True}),
        ({"num_local_experts": 4}, {}),
        ({"decoder_sparse_step": 2}, {"dense_layers": (0, 2, 4)}),
        ({"decoder_sparse_step": 3, "mlp_only_layers": [2]}, {"dense_layers": (0, 1, 2, 3, 4)}),
        ({"mlp_only_layers": [1, 5]}, {"dense_layers": (1, 5)}),
        ({"use_sliding_window": True}, {"sliding_window": 4096}),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, {"sliding_window": 8}),
        ({"use_sliding_window": True, "layer_types": ["sliding_attention"] * 6}, {"sliding_window": 4096}),
        ({"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 3}, {}),
        ({"use_sliding_window": True, "sliding_window": None, "max_window_layers": 3}, {}),
        ({"layer_types": ["full_attention"] * 6, "head_dim": 16, "attention_bias": True}, {"head_dim": 16}),
    ],
)
def test_fields_of_a_config_json_with_experts(fields: dict[str, Any], changed_fields: dict[str, Any]) -> None:
    expected = {
        "intermediate_size": 1, "moe_intermediate_size": 2, "num_experts": 4, "experts_per_token": 3,
        "renormalise": False, "dense_layers": (), "attention_bias": "attention_bias" in fields, "head_dim": 0,
        "sliding_window": None,
    }  # fmt: skip
    assert Qwen3MoeHuggingFace().special_fields(FILE | fields) == expected | changed_fields


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"num_local_experts": 5}, "num_local_experts is 5 and num_experts is 4; both are the number of experts"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0; set it to a positive integer"),
        ({"decoder_sparse_step": True}, "decoder_sparse_step is True"),
        ({"decoder_sparse_step": "1"}, "decoder_sparse_step is '1'"),
        ({"use_sliding_window": True, "max_window_layers": 1}, "max_window_layers is 1 and the window is 4096"),
        ({"layer_types": ["sliding_attention"]}, "layer_types has .*, but all layers of qwen3_moe are full"),
        ({"use_sliding_window": True, "layer_types": ["full_attention"]}, "all layers of .* are sliding_attention"),
    ],
)  # fmt: skip
def test_a_config_json_with_experts_that_contradicts_itself_is_refused(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        Qwen3MoeHuggingFace().special_fields(FILE | fields)
