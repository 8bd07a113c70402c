"""gpt-oss keeps what holds for every model and computes what transformers computes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from d9d_core.cost import OpCost, Share
from d9d_core.errors import BuildError, CheckpointError
from d9d_core.kernel import OpSignature
from d9d_core.model import Stage
from d9d_core.plugin import ModelSpec, Ref
from d9d_core.traits import HasOps, modules_with
from d9d_gpt_oss.config import GptOssConfig, tiny
from d9d_gpt_oss.costs import stage_cost
from d9d_gpt_oss.hugging_face import GptOssHuggingFace
from d9d_gpt_oss.model import GptOss
from d9d_gpt_oss.plugin import d9d_models
from d9d_moe import costs
from d9d_nn.decoder.flops import training_flops_per_token
from d9d_nn.ops import grouped_linear_torch
from d9d_testing.suites.fresh import import_fresh
from d9d_testing.suites.model import ModelSuite
from d9d_testing.suites.plugin import PluginSuite
from d9d_testing.suites.support.models import export_to, random_model
from d9d_weights.graph.graph import map_tensors
from pydantic import ValidationError
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

#: Parameters of the published files; billions of all and of active parameters in table 1 of the model card.
PUBLISHED = {"20b": (20_914_757_184, 20.91, 3.61), "120b": (116_829_156_672, 116.83, 5.13)}
(SPEC,) = d9d_models()
FORM = GptOssHuggingFace()
VARIANTS: dict[str, dict[str, Any]] = {
    "as it comes": {"num_layers": 3},
    "no biases in attention": {"attention_bias": False, "rope_scaling": None, "rope_theta": 1e4, "rms_norm_eps": 1e-3},
    "tied, other pattern": {"tie_embeddings": True, "layer_types": ("full_attention", "sliding_attention")},
    "a tight clamp": {"swiglu_limit": 0.3, "swiglu_alpha": 1.1, "experts_per_token": 3},
}


def config_of(**fields: Any) -> GptOssConfig:
    return GptOssConfig.model_validate(tiny().model_dump() | fields)


class OnDevice(Ref):
    """Builds with the products by expert that GPUs choose; the reference reads the counts of rows."""

    def load(self) -> Callable[..., GptOss]:
        def build(*args: Any) -> GptOss:
            model = GptOss(*args).bfloat16()
            for module in modules_with(model, HasOps).values():
                for slot in module.op_slots().values():
                    if slot.op == "grouped_linear":
                        signature = OpSignature(slot.op, "cuda", "bfloat16", slot.static)
                        slot.bind("grouped_mm", grouped_linear_torch.build(signature))
            return model

        return build


class Suite(ModelSuite):
    plugin = "d9d_gpt_oss.plugin"
    target = "gpt_oss"
    flops_per_parameter = (1.5, 9.0)
    exported_as_stored = ("*.experts.*",)  # as transformers holds them
    initial_std = {"*.sinks.weight": 0.02, "*bias": 0.0, "*.q_proj.weight": 0.02}

    def test_a_step_never_waits_for_the_device(self, spec: ModelSpec, config: Any) -> None:
        super().test_a_step_never_waits_for_the_device(replace(spec, build=OnDevice("on:device")), config)


@pytest.mark.thorough
class TestGptOss(Suite):
    reference = "transformers:AutoModelForCausalLM"

    # In bfloat16 the router of transformers decides near ties otherwise, as it rounds its logits.
    @pytest.mark.parametrize("dtype", ["float32"])
    def test_logits_and_every_gradient_are_those_of_the_reference(
        self, spec: ModelSpec, config: Any, tmp_path: Path, dtype: str
    ) -> None:
        super().test_logits_and_every_gradient_are_those_of_the_reference(spec, config, tmp_path, dtype)


@pytest.mark.thorough
class TestGptOssBalanced(Suite):
    # The suite of the model without balancing runs it.
    test_every_data_parallel_layout_computes_the_same = None

    @pytest.fixture
    def config(self) -> GptOssConfig:  # type: ignore[override]
        losses = [{"name": "auxiliary_loss", "coefficient": 0.1}, {"name": "z_loss", "coefficient": 0.01}]
        return config_of(balancing=losses, capacity=4.0)


class TestPlugin(PluginSuite):
    plugin = "d9d_gpt_oss.plugin"
    builds_on = ("d9d_moe.plugin", "d9d_nn.plugin")


@pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS)
def test_transformers_computes_the_same_from_an_export_and_back(fields: dict[str, Any], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = config_of(**fields)
    torch.manual_seed(0)
    model, tokens = random_model(SPEC, config), torch.randint(64, (2, 16))
    export_to(tmp_path, FORM, config, model, "float32")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    assert type(theirs).__name__ == "GptOssForCausalLM"
    torch.testing.assert_close(model(tokens=tokens)["logits"], theirs(tokens).logits, rtol=1e-5, atol=1e-5)
    theirs.save_pretrained(tmp_path / "theirs")
    assert FORM.config_from_json(json.loads((tmp_path / "theirs" / "config.json").read_text())) == config
    ours, saved = (load_file(at / "model.safetensors") for at in (tmp_path, tmp_path / "theirs"))
    assert ours.keys() == saved.keys()
    assert all(torch.equal(ours[name], saved[name]) for name in ours)


def quantised(exported: dict[str, Tensor]) -> dict[str, Tensor]:
    """Checkpoint with random MXFP4 experts, in OpenAI's names and layout."""
    draws, found = torch.Generator().manual_seed(0), dict(exported)
    for name in [name for name in exported if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, features, outputs = found.pop(name).shape
        blocks = torch.randint(256, (experts, outputs, features // 32, 16), generator=draws)
        scales = torch.randint(118, 126, (experts, outputs, features // 32), generator=draws)
        found |= {f"{name}_blocks": blocks.to(torch.uint8), f"{name}_scales": scales.to(torch.uint8)}
    return found


def test_mxfp4_files_are_read_as_transformers_dequantises_them() -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    config = config_of(hidden_size=64, head_dim=8, intermediate_size=32, num_layers=1)
    exported = map_tensors(FORM.exporter(config), dict(random_model(SPEC, config).named_parameters()))
    files = quantised({name: tensor.detach() for name, tensor in exported.items()})
    read = map_tensors(FORM.importer(config, config), files)
    prefix, ours = "model.layers.0.mlp.experts.", "layers.0.ffn.experts."
    both = mxfp4.convert_moe_packed_tensors(*(files[f"{prefix}gate_up_proj_{kind}"] for kind in ("blocks", "scales")))
    down = mxfp4.convert_moe_packed_tensors(*(files[f"{prefix}down_proj_{kind}"] for kind in ("blocks", "scales")))
    assert both.shape == (8, 64, 64)  # [experts, hidden, 2 * inside]
    assert torch.equal(read[f"{ours}gate_proj"], both[..., ::2])
    assert torch.equal(read[f"{ours}up_proj"], both[..., 1::2])
    assert torch.equal(read[f"{ours}down_proj"], down)
    assert read[f"{ours}down_proj"].any()


@pytest.mark.thorough
@pytest.mark.parametrize("preset", PUBLISHED)
def test_a_preset_has_the_published_number_of_parameters(preset: str) -> None:
    config = GptOssConfig.model_validate({"preset": preset})
    with torch.device("meta"):
        model = GptOss(config)
    count = sum(prod(p.shape) for p in model.parameters())
    total, billions, active = PUBLISHED[preset]
    assert count == total
    assert round(count / 1e9, 2) == billions
    # The head counts as active, the embedding does not.
    assert training_flops_per_token(config, 1) / 6e9 == pytest.approx(active, abs=0.02)
    blocks = stage_cost(config, Stage(), Share(1, 32)).blocks
    assert sum(block.count * (block.parameters + block.expert_parameters) for block in blocks) == count
    assert FORM.config_from_json(FORM.config_json(config, "bfloat16")) == config.model_copy(update={"preset": None})


def test_costs_list_every_parameter() -> None:
    (block,) = (
        one for one in stage_cost(tiny(), Stage(), Share(1, 16)).blocks if one.is_block and "layers.0" in one.names
    )
    named = {name.removeprefix("layers.0."): list(p.shape) for name, p in GptOss(tiny()).named_parameters()}
    listed = {weight.name: list(weight.shape) for op in block.ops for weight in op.weights}
    assert listed == {
        name: shape for name, shape in named.items() if not name.startswith(("layers", "emb", "head", "norm"))
    }
    halves = stage_cost(tiny(), Stage(), Share(1, 16, tensor=2)).blocks
    sinks = [
        weight for one in halves for op in one.ops for weight in op.weights if weight.name.endswith("sinks.weight")
    ]
    assert [weight.shape for weight in sinks] == [(2,), (2,)]
    with pytest.raises(BuildError, match=r"mesh.ep is 3, which does not divide 8 experts"):
        stage_cost(tiny(), Stage(), Share(1, 16, experts=3))


@pytest.mark.parametrize("compiled", [True, False])
def test_costs_of_experts_are_those_of_their_parts(compiled: bool) -> None:
    # Two ranks of tp with 16 tokens each, in 2 bytes; 4 of 8 experts of 32 x 24 on a rank; a token has 2 experts.
    share = Share(2, 16, tensor=2, experts=2, compiled=compiled)
    _, block, *_ = stage_cost(tiny(), Stage(), share).blocks
    ops = {op.name: replace(op, weights=()) for op in block.ops}
    product, gate = costs.grouped_swiglu(32, 32, 24, 4, 2, compiled=compiled, weights=())
    sent, router = costs.dispatch(16, 8, 2, 32, 2, 2), costs.router(16, 32, 8, 2, weights=())
    expected = [
        OpCost("ffn input", "memory", kept=2 * 16 * 32), *router, costs.permutation(16, 32, 32, 2), product,
        OpCost("biases", "memory", traffic=6 * 32 * 80, backward_traffic=2 * 32 * 80, kept=8 * 32),
        replace(gate, kept=2 * 2 * 32 * 24), *sent.ops,
    ]  # fmt: skip
    assert list(ops.values())[-len(expected) :] == expected
    states = 3 * 2 * 16 * 32  # hidden states and their gradients
    assert block.workspace == pytest.approx(states + 2 * 2 * 32 * (32 + 24) + sent.workspace)
    assert (block.exchanges[2:], block.backward_exchanges[2:]) == (sent.exchanges, sent.backward_exchanges)
    assert block.expert_parameters == 4 * (3 * 32 * 24 + 2 * 24 + 32)


def test_flops_are_what_a_step_executes() -> None:
    config, length = tiny(), 16
    model, tokens = random_model(SPEC, config), torch.randint(config.vocab_size, (2, length))
    with FlopCounterMode(display=False) as counter:
        model(tokens=tokens, targets=tokens)["token_loss"].sum().backward()
    # The reference computes the whole square of attention, and gradients of biases are products with zeros and ones.
    square = 12 * config.num_layers * config.num_attention_heads * config.head_dim * length
    biases = 2 * config.experts_per_token * config.num_experts * (2 * config.intermediate_size + config.hidden_size)
    formula = training_flops_per_token(config, length)
    counted = 12 * config.num_attention_heads * config.head_dim * sum(keys(config, layer, length) for layer in (0, 1))
    assert counter.get_total_flops() / tokens.numel() == formula - counted + square + config.num_layers * biases


def keys(config: GptOssConfig, layer: int, length: int) -> float:
    """Average number of keys that the formula counts for a query."""
    beyond = max(length - (config.window(layer) or length), 0)
    return length / 2 - beyond**2 / (2 * length)


def published(**fields: Any) -> dict[str, Any]:
    """Contents of OpenAI's ``config.json`` of 20b, with some fields changed."""
    return {
        "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
        "eos_token_id": 200002, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880,
        "initial_context_length": 4096, "initializer_range": 0.02, "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 12, "max_position_embeddings": 131072,
        "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24,
        "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": False, "pad_token_id": 199999,
        "quantization_config": {
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens"],
            "quant_method": "mxfp4",
        },
        "rms_norm_eps": 1e-05, "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
            "rope_type": "yarn", "truncate": False,
        },
        "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
        "tie_word_embeddings": False, "transformers_version": "4.55.0.dev0", "use_cache": True, "vocab_size": 201088,
    } | fields  # fmt: skip


def test_the_published_config_is_the_preset() -> None:
    preset = GptOssConfig.model_validate({"preset": "20b"}).model_copy(update={"preset": None})
    assert FORM.config_from_json(published()) == preset
    left = {
        "rope_scaling", "rope_theta", "layer_types", "head_dim", "swiglu_limit", "sliding_window", "rms_norm_eps",
        "tie_word_embeddings", "initializer_range", "attention_bias", "max_position_embeddings",
    }  # fmt: skip
    short = {name: value for name, value in published().items() if name not in left}
    assert FORM.config_from_json(short) == preset


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "quantization_config is {'quant_method': 'fp8'}; these weights",
        ),
        ({"experts_per_token": 2}, "experts_per_token is 2 and num_experts_per_tok is 4; .* remove the wrong field"),
        ({"num_experts": 2}, "num_experts is 2 and num_local_experts is 32"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 24 layers"),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"num_experts_per_tok": 64, "experts_per_token": 64}, "64 is more than num_experts = 32"),
    ],
)
def test_what_gpt_oss_does_not_compute_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        FORM.config_from_json(published(**fields))


@pytest.mark.parametrize(
    ("fields", "field", "said"),
    [
        ({"experts_per_token": 9}, "experts_per_token", "9 is more than num_experts = 8; give at most 8"),
        (
            {"balancing": [{"name": "bias_update"}]},
            "balancing",
            "which files of gpt_oss cannot hold; use auxiliary_loss",
        ),
        ({"balancing": ["z_loss", "z_loss"]}, "balancing", "z_loss appears twice; keep one"),
        ({"local_rope_theta": 1e4}, "local_rope_theta", "should be None"),
        ({"swiglu_limit": 0}, "swiglu_limit", "greater than 0"),
        ({"swiglu_alpha": -1}, "swiglu_alpha", "greater than 0"),
        ({"capacity": 0}, "capacity", "greater than 0"),
    ],
)
def test_impossible_configs_are_refused_where_they_are_wrong(fields: dict[str, Any], field: str, said: str) -> None:
    with pytest.raises(ValidationError) as error:
        config_of(**fields)
    (line,) = error.value.errors()
    assert line["loc"][0] == field
    assert said in line["msg"]


def test_balancing_and_capacity_are_kept_by_an_export() -> None:
    config = config_of(balancing=[{"name": "auxiliary_loss", "coefficient": 0.1}], capacity=1.5)
    assert FORM.config_from_json(json.loads(json.dumps(FORM.config_json(config, "float32")))) == config


def test_a_config_is_checked_and_its_costs_are_counted_without_torch() -> None:
    facts = import_fresh("d9d_gpt_oss.costs", "d9d_gpt_oss.hugging_face")
    assert "torch" not in facts["d9d_gpt_oss.costs"].modules | facts["d9d_gpt_oss.hugging_face"].modules
