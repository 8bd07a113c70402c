"""Qwen3-Next and Qwen3.5 compute what transformers computes, and exchange files with it."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from d9d_core.cost import Share
from d9d_core.errors import BuildError, CheckpointError
from d9d_core.model import Stage
from d9d_nn.ops.gated_delta_rule import chunked
from d9d_qwen3_next.config import AnyConfig, tiny, tiny_dense, tiny_moe
from d9d_qwen3_next.costs import stage_cost
from d9d_qwen3_next.model import Qwen3Next
from d9d_qwen3_next.plugin import d9d_models
from d9d_testing.suites.support.models import export_to, random_model
from d9d_weights.graph.graph import StateGraph, map_tensors, specs_of
from pydantic import ValidationError
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

SPECS = {spec.name: spec for spec in d9d_models()}
TINY: dict[str, AnyConfig] = {"qwen3_next": tiny(), "qwen3_5": tiny_dense(), "qwen3_5_moe": tiny_moe()}
CLASSES = {
    "qwen3_next": "Qwen3NextForCausalLM", "qwen3_5": "Qwen3_5ForCausalLM", "qwen3_5_moe": "Qwen3_5MoeForCausalLM",
}  # fmt: skip
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3_next", {}),
    (
        "qwen3_next",
        {"num_layers": 5, "layer_types": ("linear_attention",) * 3 + ("full_attention",), "dense_layers": (1,)},
    ),
    ("qwen3_next", {"linear_num_key_heads": 4, "linear_conv_kernel_dim": 2, "shared_expert_intermediate_size": 20}),
    ("qwen3_5", {}),
    ("qwen3_5", {"attention_bias": True, "tie_embeddings": True, "partial_rotary_factor": 0.25, "head_dim": 16}),
    ("qwen3_5", {"linear_key_head_dim": 4, "linear_num_value_heads": 6, "num_layers": 3}),
    ("qwen3_5", {"layer_types": ("full_attention",)}),
    ("qwen3_5", {"layer_types": ("linear_attention",)}),
    ("qwen3_5_moe", {"expert_files": "fused"}),
]
#: Parameters of the text models, from their ``config.json``; a model that predicts further tokens has more.
COUNTS = {
    ("qwen3_next", "80b-a3b"): 79_674_391_296,
    ("qwen3_5", "9b"): 8_953_803_264,
    ("qwen3_5", "27b"): 26_895_998_464,
    ("qwen3_5_moe", "35b-a3b"): 34_660_610_688,
}


def changed(name: str, **fields: Any) -> AnyConfig:
    config = TINY[name]
    return type(config).model_validate(config.model_dump() | fields)


def form_of(name: str) -> Any:
    hugging_face = SPECS[name].hugging_face
    assert hugging_face is not None
    return hugging_face.load()()


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "fields"), VARIANTS)
def test_transformers_computes_the_same_from_an_export_and_back(
    name: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    config, form = changed(name, **fields), form_of(name)
    torch.manual_seed(1)
    model, tokens = random_model(SPECS[name], config), torch.randint(64, (2, 70))
    export_to(tmp_path, form, config, model, "float32")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert type(theirs).__name__ == CLASSES[name]
    found, expected = model(tokens=tokens)["logits"], theirs(tokens, use_cache=False).logits
    # transformers' rule is in float32 too, and as far from the result in float64 as this.
    assert (found - expected).norm() < 2e-5 * expected.norm()
    theirs.save_pretrained(tmp_path / "theirs")
    saved = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert form.config_from_json(saved | {"d9d": form.own_fields(config)}) == config
    again = load_file(tmp_path / "theirs" / "model.safetensors")
    graph = StateGraph(form.importer(config, config), specs_of(again))
    graph.check(specs_of(dict(model.named_parameters())))
    restored = map_tensors(form.importer(config, config), again)
    assert all(torch.equal(restored[name], parameter) for name, parameter in model.named_parameters())


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "preset"), COUNTS)
def test_a_preset_has_the_published_number_of_parameters(name: str, preset: str) -> None:
    config = SPECS[name].config.load().model_validate({"preset": preset})
    with torch.device("meta"):
        model = Qwen3Next(config)
    count = sum(prod(p.shape) for p in model.parameters())
    assert count == COUNTS[name, preset]
    blocks = stage_cost(config, Stage(), Share(1, 64)).blocks
    assert sum(block.count * (block.parameters + block.expert_parameters) for block in blocks) == count
    form = form_of(name)
    assert form.config_from_json(form.config_json(config, "bfloat16")) == config.model_copy(update={"preset": None})


LEFT_OUT = ("mtp.fc.weight", "model.visual.patch_embed.proj.weight")


def published_tensors(name: str, prefix: str) -> tuple[Any, dict[str, Any]]:
    """Specs of a tiny model, and of its published files with another prefix and with tensors that are not read."""
    with torch.device("meta"):
        specs = specs_of(dict(Qwen3Next(TINY[name]).named_parameters()))
    files = dict(StateGraph(form_of(name).exporter(TINY[name]), specs).specs)
    files = {key.replace("model.", prefix, 1) if key.startswith("model.") else key: s for key, s in files.items()}
    return specs, files | dict.fromkeys(
        ("mtp.fc.weight", "model.visual.patch_embed.proj.weight"), files["lm_head.weight"]
    )


@pytest.mark.parametrize(
    ("name", "prefix"), [("qwen3_next", "model."), ("qwen3_5", "model.language_model."), ("qwen3_5_moe", "model.")]
)
def test_tensors_that_no_text_model_has_are_reported_as_left_out(name: str, prefix: str) -> None:
    specs, files = published_tensors(name, prefix)
    graph = StateGraph(form_of(name).importer(TINY[name], TINY[name]), files)
    graph.check(specs)
    assert set(graph.left_out) == set(LEFT_OUT)
    with pytest.raises(CheckpointError, match="unheard_of"):
        StateGraph(
            form_of(name).importer(TINY[name], TINY[name]), {**files, "model.unheard_of": files["mtp.fc.weight"]}
        ).check(specs)


def published(name: str, **fields: Any) -> dict[str, Any]:
    """Contents of a published ``config.json``: an interval of attention instead of kinds of layers."""
    config = changed(name, num_layers=4, layer_types=("linear_attention",) * 3 + ("full_attention",))
    left = {"layer_types", "d9d", "initializer_range", "pad_token_id"}
    written = {key: value for key, value in form_of(name).config_json(config, "bfloat16").items() if key not in left}
    return {**written, "full_attention_interval": 4, "use_sliding_window": False, **fields}


@pytest.mark.parametrize("name", TINY)
def test_files_with_an_interval_of_attention_are_read(name: str) -> None:
    config = changed(name, num_layers=4, layer_types=("linear_attention",) * 3 + ("full_attention",))
    assert form_of(name).config_from_json(published(name)) == config


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_the_text_model_of_a_model_of_images_is_read(name: str) -> None:
    rope = {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default", "rope_theta": 1e7}
    text = published(
        name, rope_parameters=rope | {"partial_rotary_factor": 0.5}, attn_output_gate=True, mamba_ssm_dtype="float32",
        mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=False, mlp_only_layers=[],
    )  # fmt: skip
    text = {key: value for key, value in text.items() if key not in ("architectures", "tie_word_embeddings")}
    outer = {
        "architectures": ["Other"],
        "model_type": name,
        "text_config": text,
        "vision_config": {},
        "image_token_id": 9,
    }
    expected = changed(name, num_layers=4, rope_theta=1e7, layer_types=("linear_attention",) * 3 + ("full_attention",))
    assert form_of(name).config_from_json(outer | {"tie_word_embeddings": False}) == expected
    with pytest.raises(CheckpointError, match="text_config is None"):
        form_of(name).config_from_json({"model_type": name})


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "kind"), [("qwen3_5", "Qwen3_5"), ("qwen3_5_moe", "Qwen3_5Moe")])
def test_a_model_of_images_computes_the_same_for_a_text(name: str, kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    form, written = form_of(name), form_of(name).config_json(TINY[name], "float32")
    text = {key: value for key, value in written.items() if key not in ("architectures", "torch_dtype", "rope_scaling")}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    ids = dict.fromkeys(("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"), 63)
    config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=vision, **ids)
    torch.manual_seed(0)
    theirs = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    theirs.save_pretrained(tmp_path)
    assert form.config_from_json(json.loads((tmp_path / "config.json").read_text())) == TINY[name]
    files = load_file(tmp_path / "model.safetensors")
    graph, ours = StateGraph(form.importer(TINY[name], TINY[name]), specs_of(files)), Qwen3Next(TINY[name])
    graph.check(specs_of(dict(ours.named_parameters())))
    assert all(left.startswith("model.visual.") for left in graph.left_out)
    ours.load_state_dict(graph.apply(files))
    tokens = torch.randint(60, (2, 20))
    expected = theirs(input_ids=tokens, use_cache=False).logits
    torch.testing.assert_close(ours(tokens=tokens)["logits"], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (published("qwen3_next", use_sliding_window=True), "use_sliding_window is True"),
        (published("qwen3_next", attn_output_gate=False), "attn_output_gate is False"),
        (published("qwen3_next", full_attention_interval=0), "full_attention_interval is 0"),
        (published("qwen3_next", layer_types=["full_attention"]), "layer_types has 1 entries for 4 layers"),
        (published("qwen3_next", layer_types=["sliding_attention"] * 4), "layer_types.0"),
        (published("qwen3_next", hidden_act="gelu"), "hidden_act is 'gelu'"),
        (published("qwen3_next", linear_num_value_heads=3), "3 is no multiple of linear_num_key_heads = 2"),
        (published("qwen3_next", model_type="qwen3_5"), "model_type is 'qwen3_5', not 'qwen3_next'"),
    ],
)
def test_what_the_model_does_not_compute_is_refused(data: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        form_of("qwen3_next").config_from_json(data)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"linear_num_value_heads": 3}, "3 is no multiple of linear_num_key_heads = 2"),
        ({"partial_rotary_factor": 0.1}, "0.1 of head_dim = 8 are 0 rotated features"),
        ({"linear_conv_kernel_dim": 1}, "greater than or equal to 2"),
        ({"layer_types": ()}, "at least 1 item"),
    ],
)
def test_impossible_sizes_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        changed("qwen3_5", **fields)


def test_key_heads_that_tp_does_not_divide_have_no_cost() -> None:
    with pytest.raises(BuildError, match=r"mesh\.tp is 4, which does not divide the 2 key heads of Gated DeltaNet"):
        stage_cost(TINY["qwen3_5"], Stage(), Share(1, 64, tensor=4))


def test_the_cost_of_the_rule_is_that_of_its_products_and_kept_tensors() -> None:
    config = SPECS["qwen3_5"].config.load().model_validate({"preset": "9b", "linear_num_value_heads": 16})
    length, heads, features, chunk = 128, 16, 128, 64
    blocks = stage_cost(config, Stage(), Share(1, length)).blocks
    (cost,) = {op for block in blocks for op in block.ops if op.name == "gated delta rule"}
    tensors = [torch.randn(1, length, heads, features, requires_grad=True) for _ in range(3)]
    gates = [(sign * torch.rand(1, length, heads)).requires_grad_() for sign in (-1, 1)]
    stored: dict[int, Tensor] = {}  # the tensors, so that no address is used twice

    def keep(tensor: Tensor) -> Tensor:
        stored[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with FlopCounterMode(display=False) as counter, torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        chunked(*tensors, *gates)
    # The counter leaves out the triangular systems, and the products inside of the scan over chunks.
    others = length * heads * (chunk * 2 * features + 2 * features**3 / chunk)
    assert counter.get_total_flops() == cost.flops - others
    bytes_ = sum(tensor.untyped_storage().nbytes() for tensor in stored.values())
    assert bytes_ == pytest.approx(cost.kept, rel=0.1)


def test_each_model_type_has_an_example() -> None:
    for name, spec in SPECS.items():
        assert all(form_of(name).example(kind) == TINY[name] for kind in spec.model_types)
