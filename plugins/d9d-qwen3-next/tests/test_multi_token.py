"""The layer that predicts a further token: its files, its documents and its costs, in each family."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from d9d_core.cost import Share
from d9d_core.model import Stage
from d9d_nn.delta.gated_delta_net import GatedDeltaNet
from d9d_nn.further_targets import further_targets
from d9d_qwen3_next.config import AnyConfig, tiny, tiny_dense, tiny_moe
from d9d_qwen3_next.costs import stage_cost
from d9d_qwen3_next.model import Qwen3Next
from d9d_qwen3_next.plugin import d9d_models
from d9d_testing.suites.support.models import random_model
from d9d_testing.tolerances import assert_close_values
from d9d_weights.graph.graph import StateGraph, map_tensors, specs_of
from d9d_weights.sharding.model_tensors import model_tensors
from pydantic import ValidationError
from torch import Tensor

SPECS = {spec.name: spec for spec in d9d_models()}
FURTHER = {"mtp": {"depths": 1, "weight": 0.2}}
CONFIGS: dict[str, AnyConfig] = {
    config.name: type(config).model_validate(config.model_dump() | FURTHER)
    for config in (tiny(), tiny_dense(), tiny_moe())
}
CONFIGS["fused, biased"] = type(tiny()).model_validate(
    tiny().model_dump() | FURTHER | {"expert_files": "fused", "balancing": ["bias_update"], "attention_bias": True}
)
configs = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
#: Names in published files, except in the feed-forward layer.
PUBLISHED = {
    "mtp.fc.weight", "mtp.norm.weight", "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight",
    *(
        f"mtp.layers.0.{name}.weight"
        for name in (
            "input_layernorm", "post_attention_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
            "self_attn.o_proj", "self_attn.q_norm", "self_attn.k_norm",
        )
    ),
}  # fmt: skip


def form_of(config: AnyConfig) -> Any:
    hugging_face = SPECS[config.name].hugging_face
    assert hugging_face is not None
    return hugging_face.load()()


def state_of(config: AnyConfig) -> dict[str, Tensor]:
    return {name: t.detach() for name, t in model_tensors(random_model(SPECS[config.name], config)).items()}


@configs
def test_files_hold_the_layer_as_published_and_are_read_again(config: AnyConfig) -> None:
    form, state = form_of(config), state_of(config)
    files = map_tensors(form.exporter(config), state)
    ours = {name for name in files if name.startswith("mtp.")}
    assert ours >= PUBLISHED
    assert {name for name in ours - PUBLISHED if not name.endswith(".bias")} == {
        name.replace("model.layers.1.", "mtp.layers.0.") for name in files if name.startswith("model.layers.1.mlp.")
    }
    described = json.loads(json.dumps(form.config_json(config, "float32")))
    assert described["mtp_num_hidden_layers"] == 1
    assert form.config_from_json(described) == config
    read = map_tensors(form.importer(config, config), files)
    assert read.keys() == state.keys()
    assert all(torch.equal(read[name], state[name]) for name in state)


@configs
def test_a_job_reads_the_layer_leaves_it_out_or_begins_a_new_one(config: AnyConfig) -> None:
    form = form_of(config)
    without = type(config).model_validate(config.model_dump() | {"mtp": {"depths": 0}})
    files = map_tensors(form.exporter(config), state_of(config))
    plain = {name: value for name, value in form.config_json(config, "float32").items() if name != "d9d"}
    assert form.config_from_json(plain).mtp.depths == 0
    left = StateGraph(form.importer(without, config), specs_of(files))
    left.check(specs_of(state_of(without)))
    assert set(left.left_out) == {name for name in files if name.startswith("mtp.")}
    older = {name: tensor for name, tensor in files.items() if not name.startswith("mtp.")}
    new = StateGraph(form.importer(config, without), specs_of(older))
    state = state_of(config)
    new.check(specs_of(state))
    assert set(new.fresh) == {name for name in state if name.startswith("mtp.")}


@configs
def test_the_layer_has_attention_and_sees_one_document(config: AnyConfig) -> None:
    model = random_model(SPECS[config.name], config)
    assert isinstance(model, Qwen3Next)
    assert model.mtp is not None
    assert not any(isinstance(module, GatedDeltaNet) for module in model.mtp.modules())
    draws = torch.Generator().manual_seed(3)
    tokens = torch.randint(64, (1, 12), generator=draws)
    documents = torch.tensor([[0] * 5 + [1] + [2] * 6])
    positions = torch.cat([torch.arange(size) for size in (5, 1, 6)])[None]
    targets = tokens.roll(-1, 1).masked_fill(documents != documents.roll(-1, 1), -100)
    targets[0, -1] = -100
    batch = {"tokens": tokens, "targets": targets, "documents": documents, "positions": positions}
    model(**batch)
    (together,) = (total.clone() for total in model.mtp.loss_sums().values())
    alone = []
    for start, size in ((0, 5), (5, 1), (6, 6)):
        model(**{name: batch[name][:, start : start + size] for name in ("tokens", "targets")})
        alone += [total.clone() for total in model.mtp.loss_sums().values()]
    assert alone[1] == 0.0
    assert_close_values(torch.stack(alone).sum(), together)
    assert (further_targets(tokens, targets, 1, documents=documents)["mtp_targets"] != -100).sum() == 7


@configs
@pytest.mark.parametrize("count", [1, 2])
def test_costs_have_the_weights_of_the_stages_that_are_built(config: AnyConfig, count: int) -> None:
    for index in range(count):
        cost = stage_cost(config, Stage(index, count), Share(2, 16))
        with torch.device("meta"):
            own = {n: tuple(p.shape) for n, p in Qwen3Next(config, Stage(index, count)).named_parameters()}
        named = {
            f"{name}.{weight.name}" if name else weight.name: weight.shape
            for block in cost.blocks
            for name in block.names or ("",)
            for op in block.ops
            for weight in op.weights
        }
        assert {name for name in named if name.startswith("mtp.")} <= own.keys()
        numbers = sum(block.count * (block.parameters + block.expert_parameters) for block in cost.blocks)
        assert numbers == sum(torch.Size(shape).numel() for shape in own.values())


@pytest.mark.parametrize(
    ("mtp", "said"),
    [
        ({"depths": 2}, "files of this family hold one layer for further tokens, not 2; set depths to 1"),
        ({"depths": 1, "first": "hidden"}, "files of this family have the embedding first; remove 'first'"),
    ],
)
def test_what_files_cannot_hold_is_refused(mtp: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        type(tiny()).model_validate(tiny().model_dump() | {"mtp": mtp})
