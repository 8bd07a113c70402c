"""DeepSeek-V3 computes the numbers of transformers' model, from files of d9d and of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from d9d_core.errors import CheckpointError
from d9d_deepseek.config import DeepSeekConfig, tiny
from d9d_deepseek.hugging_face import DeepSeekHuggingFace
from d9d_deepseek.model import DeepSeek
from d9d_deepseek.plugin import d9d_models
from d9d_nn.rope.scaling import YarnScaling, latent_score_factor
from d9d_testing.suites.support.models import gradients_of, initialised
from d9d_testing.tolerances import Tolerance, assert_close_gradients, assert_close_values
from d9d_weights.graph.graph import StateGraph, map_tensors, specs_of
from d9d_weights.hugging_face.export import ModelFiles, export_model
from d9d_weights.hugging_face.writer import ModelWriter
from d9d_weights.sharding.model_tensors import model_tensors
from safetensors.torch import load_file
from torch import Tensor, nn

(SPEC,) = d9d_models()
FORM = DeepSeekHuggingFace()
YARN = YarnScaling(factor=40.0, original_max_positions=16, mscale=1.0, mscale_all_dim=0.7)


def changed(**fields: Any) -> DeepSeekConfig:
    return DeepSeekConfig.model_validate(tiny().model_dump() | fields)


CONFIGS = {
    "tiny": tiny(),
    "plain queries": changed(q_lora_rank=None),
    "yarn": changed(rope_scaling=YARN),
    "yarn without mscale": changed(rope_scaling=YarnScaling(factor=4.0, original_max_positions=16)),
    "biases, another epsilon": changed(attention_bias=True, rms_norm_eps=0.1),
    "plain queries, biases": changed(attention_bias=True, q_lora_rank=None),
    "values as large as keys": changed(v_head_dim=24),
    "one group": changed(num_groups=1, top_groups=1, experts_per_token=6),
    "not renormalised, two shared experts": changed(renormalise=False, num_shared_experts=2),
    "no dense layer, tied": changed(first_expert_layer=0, tie_embeddings=True),
}


def random_model(config: DeepSeekConfig) -> DeepSeek:
    """Weights and selection biases far from their start, so that nothing cancels."""
    model = initialised(SPEC, config)
    assert isinstance(model, DeepSeek)
    draws = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            inside = parameter.shape[-2] if ".experts." in name else parameter.shape[-1]
            parameter.normal_(mean=1.0 if "norm" in name else 0.0, std=inside**-0.5, generator=draws)
        for name, buffer in model.named_buffers():
            if name.endswith("selection_bias"):
                buffer.normal_(std=0.3, generator=draws)
    return model


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and selection biases."""
    return {name: tensor.detach() for name, tensor in model_tensors(model).items()}


def export_to(directory: Path, config: DeepSeekConfig, model: DeepSeek) -> None:
    """As a job does at its end."""
    state = state_of(model)
    graph = StateGraph(FORM.exporter(config), specs_of(state))
    export_model(ModelWriter(directory, graph.specs), graph, state, ModelFiles(FORM.config_json(config, "float32")))


def tokens_of(config: DeepSeekConfig) -> Tensor:
    return torch.randint(config.vocab_size, (3, 17), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def transformers() -> Any:
    return pytest.importorskip("transformers")


def loaded(cls: Any, directory: Path) -> Any:
    """Their model from our files; nothing in them may be missing or too much."""
    theirs, report = cls.from_pretrained(directory, output_loading_info=True, dtype=torch.float32)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return theirs


@pytest.mark.thorough
@pytest.mark.parametrize("variant", CONFIGS)
def test_language_models_agree_in_logits_and_every_gradient(variant: str, tmp_path: Path, transformers: Any) -> None:
    config = CONFIGS[variant]
    ours, tokens = random_model(config), tokens_of(config)
    export_to(tmp_path, config, ours)
    theirs = loaded(transformers.AutoModelForCausalLM, tmp_path)
    assert type(theirs).__name__ == "DeepseekV3ForCausalLM"
    logits, targets = theirs(tokens).logits, tokens.roll(-1, dims=1)
    assert_close_values(ours(tokens=tokens)["logits"], logits, within=Tolerance(1e-5, 1e-5, 0, 0))
    nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    ours(tokens=tokens, targets=targets)["token_loss"].sum().backward()
    graph = FORM.importer(config, config)
    reference = {
        name: gradient
        for name, gradient in map_tensors(graph, gradients_of(theirs) | biases_of(theirs)).items()
        if not name.endswith("selection_bias")
    }
    found = gradients_of(ours)
    assert found.keys() == dict(ours.named_parameters()).keys()
    assert_close_gradients(found, reference, within=Tolerance(rtol=0, atol=0, angle=1e-8, norm=1e-4))


def biases_of(theirs: nn.Module) -> dict[str, Tensor]:
    return {name: buffer for name, buffer in theirs.named_buffers() if name.endswith("e_score_correction_bias")}


def test_what_transformers_saves_reads_back_to_the_same_model(tmp_path: Path, transformers: Any) -> None:
    config = CONFIGS["yarn"]
    model = random_model(config)
    export_to(tmp_path, config, model)
    loaded(transformers.AutoModelForCausalLM, tmp_path).save_pretrained(tmp_path / "theirs")
    ours, saved = (load_file(at / "model.safetensors") for at in (tmp_path, tmp_path / "theirs"))
    assert ours.keys() == saved.keys()
    assert all(torch.equal(ours[name], saved[name]) for name in ours)
    assert "model.layers.1.mlp.gate.e_score_correction_bias" in saved
    assert FORM.config_from_json(json.loads((tmp_path / "theirs" / "config.json").read_text())) == config


def test_fused_experts_are_read(tmp_path: Path) -> None:
    config = tiny()
    model = random_model(config)
    export_to(tmp_path, config, model)
    files = load_file(tmp_path / "model.safetensors")
    fused = {name: tensor for name, tensor in files.items() if ".experts." not in name}
    stacked = {
        matrix: torch.stack([files[f"model.layers.1.mlp.experts.{expert}.{matrix}.weight"] for expert in range(8)])
        for matrix in ("gate_proj", "up_proj", "down_proj")
    }
    fused["model.layers.1.mlp.experts.gate_up_proj"] = torch.cat([stacked["gate_proj"], stacked["up_proj"]], dim=1)
    fused["model.layers.1.mlp.experts.down_proj"] = stacked["down_proj"]
    read = map_tensors(FORM.importer(config, config), fused)
    assert all(torch.equal(read[name], tensor) for name, tensor in model_tensors(model).items())


@pytest.mark.parametrize("prefix", ["model.", ""])
def test_layers_that_predict_further_tokens_are_left_out_and_listed(prefix: str) -> None:
    config = tiny()
    state = state_of(random_model(config))
    files = map_tensors(FORM.exporter(config), state)
    for name in [name for name in files if name.startswith("model.layers.1.")]:
        files[name.replace("layers.1.", "layers.2.")] = files[name]
    files["model.layers.2.eh_proj.weight"] = torch.zeros(32, 64)
    files = {name if name == "lm_head.weight" else prefix + name.removeprefix("model."): t for name, t in files.items()}
    graph = StateGraph(FORM.importer(config, config), specs_of(files))
    graph.check(specs_of(state))
    assert sorted(graph.left_out) == sorted(name for name in files if "layers.2." in name)
    published = FORM.config_json(config, "float32") | {"num_nextn_predict_layers": 1}
    assert FORM.config_from_json(published) == config


#: Contents of the ``config.json`` files that both models have in common.
COMMON: dict[str, Any] = {
    "attention_bias": False, "attention_dropout": 0.0, "ep_size": 1, "hidden_act": "silu", "initializer_range": 0.02,
    "kv_lora_rank": 512, "model_type": "deepseek_v3", "moe_layer_freq": 1, "norm_topk_prob": True,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "scoring_func": "sigmoid", "seq_aux": True,
    "tie_word_embeddings": False, "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "use_cache": True,
    "v_head_dim": 128,
}  # fmt: skip
#: As their authors published them.
PUBLISHED: dict[str, dict[str, Any]] = {
    "671b": COMMON | {
        "first_k_dense_replace": 3, "hidden_size": 7168, "intermediate_size": 18432, "max_position_embeddings": 163840,
        "moe_intermediate_size": 2048, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1,
        "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "rms_norm_eps": 1e-6, "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "type": "yarn",
        }, "rope_theta": 10000, "routed_scaling_factor": 2.5, "topk_group": 4, "transformers_version": "4.33.1",
        "vocab_size": 129280,
    },
    "moonlight-16b-a3b": COMMON | {
        "aux_loss_alpha": 0.001, "first_k_dense_replace": 1, "hidden_size": 2048, "intermediate_size": 11264,
        "max_position_embeddings": 8192, "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 64,
        "n_shared_experts": 2, "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27,
        "num_key_value_heads": 16, "num_nextn_predict_layers": 0, "q_lora_rank": None, "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0, "routed_scaling_factor": 2.446, "topk_group": 1, "vocab_size": 163840,
    },
}  # fmt: skip


@pytest.mark.parametrize("preset", PUBLISHED)
def test_a_published_config_is_the_preset(preset: str) -> None:
    config = DeepSeekConfig.model_validate({"preset": preset}).model_copy(update={"preset": None})
    assert FORM.config_from_json(PUBLISHED[preset]) == config
    assert FORM.config_from_json(FORM.config_json(config, "bfloat16")) == config


YARN_JSON: dict[str, Any] = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale_all_dim": 1}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is .*; these weights are quantized"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ({"topk_method": "greedy"}, "topk_method is 'greedy'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        ({"rope_interleave": False}, "rope_interleave is False"),
        ({"num_nextn_predict_layers": 9}, "num_nextn_predict_layers is 9; d9d reads models with 0 to 8"),
        ({"sliding_window": 8}, "sliding_window is 8"),
        ({"num_key_value_heads": 2}, "num_key_value_heads: 2 is not num_attention_heads = 4"),
        ({"rope_scaling": YARN_JSON}, "only for rope_type yarn, together with mscale"),
        ({"rope_scaling": YARN_JSON | {"mscale": 1, "attention_factor": 1.0}}, "without attention_factor"),
        ({"rope_scaling": YARN_JSON | {"mscale": 1, "type": "linear"}}, "only for rope_type yarn"),
    ],
)
def test_what_the_model_does_not_compute_is_refused(fields: dict[str, Any], said: str) -> None:
    written = FORM.config_json(tiny(), "float32")
    del written["rope_parameters"]
    with pytest.raises(CheckpointError, match=said):
        FORM.config_from_json(written | fields)


def test_quantised_files_are_refused_even_if_their_config_does_not_say_so() -> None:
    state = state_of(random_model(tiny()))
    files = map_tensors(FORM.exporter(tiny()), state)
    files["model.layers.0.self_attn.o_proj.weight_scale_inv"] = torch.ones(1, 1)
    with pytest.raises(CheckpointError, match="weight_scale_inv"):
        StateGraph(FORM.importer(tiny(), tiny()), specs_of(files)).check(specs_of(state))


def test_scores_are_scaled_by_the_square_of_mscale_of_all_features() -> None:
    assert latent_score_factor(YARN) == pytest.approx((0.07 * torch.tensor(40.0).log().item() + 1) ** 2)
    assert latent_score_factor(None) == 1.0
    assert latent_score_factor(YarnScaling(factor=4.0, original_max_positions=16)) == 1.0
