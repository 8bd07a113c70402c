"""Language models inside larger models are trained alone, exactly, or refused; ignored tensors are left out."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from d9d_core.errors import BuildError, CheckpointError
from d9d_core.model import Stage
from d9d_core.traits import LateInit, modules_with
from d9d_transformers import containers
from d9d_transformers.build import build
from d9d_transformers.config import TransformersConfig, example
from d9d_transformers.conversion import exporter, importer
from d9d_transformers.hugging_face import TransformersFormat
from d9d_transformers.library import language_fields, library, native_config, native_model
from d9d_transformers.model import TransformersModel
from d9d_weights.graph.graph import StateGraph, map_tensors, specs_of
from safetensors.torch import load_file
from torch import Tensor

VISION = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 8, "depth": 1, "num_heads": 2, "out_hidden_size": 32,
}  # fmt: skip
#: Other types are tried in .ci/run.
CONTAINERS = ["gemma3", *(
    pytest.param(kind, marks=pytest.mark.thorough)
    for kind in ("mistral3", "llava", "llava_onevision", "qwen3_5", "internvl", "idefics3", "lfm2_vl", "got_ocr2")
)]  # fmt: skip
FORM = TransformersFormat()


def whole_config(kind: str) -> Any:
    """Config object of a small model of images and text."""
    known = native_config({"model_type": kind}).to_dict()
    text, vision = known["text_config"], known["vision_config"]
    inner = example(text["model_type"]).config
    sizes = {name: size for name, size in VISION.items() if name in vision}
    named = {"model_type": vision["model_type"]} if "model_type" in vision else {}
    return native_config({"model_type": kind, "text_config": inner, "vision_config": {**named, **sizes}})


def saved(kind: str, directory: Path) -> tuple[Any, dict[str, Any], dict[str, Tensor]]:
    """Small model of images and text, and the config.json and the tensors of its files."""
    torch.manual_seed(0)
    whole = library().AutoModelForImageTextToText.from_config(whole_config(kind)).float().eval()
    whole.save_pretrained(directory)
    files = {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}
    return whole, json.loads((directory / "config.json").read_text()), files


def loaded(config: TransformersConfig, files: dict[str, Tensor]) -> TransformersModel:
    with torch.device("meta"):
        model = build(config, Stage())
    model.to_empty(device="cpu")
    for module in modules_with(model, LateInit).values():
        module.reset_parameters()
    model.load_state_dict(map_tensors(importer(config, config), files))
    return model


@pytest.mark.parametrize("kind", CONTAINERS)
def test_the_language_model_of_a_larger_model_computes_the_same_alone(kind: str, tmp_path: Path) -> None:
    whole, described, files = saved(kind, tmp_path)
    config = FORM.config_from_json(described)
    assert config.container == kind
    model = loaded(config, files)
    tokens = torch.randint(3, 120, (2, 12), generator=torch.Generator().manual_seed(1))
    expected = whole(input_ids=tokens).logits
    assert (model(tokens=tokens)["logits"] - expected).abs().max() < 1e-5 * expected.abs().max()


def test_an_export_is_a_language_model_that_transformers_loads(tmp_path: Path) -> None:
    whole, described, files = saved("gemma3", tmp_path)
    config = FORM.config_from_json(described)
    exported = map_tensors(exporter(config), dict(loaded(config, files).state_dict()))
    alone = FORM.config_json(config, "float32")
    assert (alone["model_type"], alone["architectures"]) == ("gemma3_text", ["Gemma3ForCausalLM"])
    assert "container" not in alone
    native = native_model(native_config(FORM.config_from_json(alone).config), "eager")
    native.load_state_dict(exported, strict=False)
    native.tie_weights()
    tokens = torch.arange(3, 11).unsqueeze(0)
    torch.testing.assert_close(native.eval()(input_ids=tokens).logits, whole(input_ids=tokens).logits)


@pytest.mark.parametrize(
    ("kind", "text"), [("cohere2_vision", "changes logits"), ("paligemma", "is_causal=False|mask")]
)
def test_a_larger_model_that_computes_text_in_another_way_is_refused(kind: str, text: str) -> None:
    config = FORM.config_from_json(json.loads(whole_config(kind).to_json_string()))
    with torch.device("meta"), pytest.raises(BuildError, match=text):
        build(config, Stage())


def test_a_larger_model_with_another_decoder_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    other = SimpleNamespace(get_decoder=lambda: torch.nn.Linear(1, 1))
    monkeypatch.setattr(containers, "_whole", lambda *_: other)
    config = FORM.config_from_json(json.loads(whole_config("gemma3").to_json_string()))
    with torch.device("meta"), pytest.raises(BuildError, match=r"a gemma3 computes text by Linear, not by Gemma3Text"):
        build(config, Stage())


def test_adapters_have_the_names_of_the_larger_model(tmp_path: Path) -> None:
    whole, described, files = saved("gemma3", tmp_path)
    config = FORM.config_from_json(described)
    named = map_tensors(FORM.adapter_names(config), dict(loaded(config, files).state_dict()))
    assert named.keys() < {name for name, _ in whole.named_parameters()} | {name for name, _ in whole.named_buffers()}
    alone = example("llama")
    with torch.device("meta"):
        state = dict(build(alone, Stage()).state_dict())
    assert map_tensors(FORM.adapter_names(alone), state).keys() == map_tensors(FORM.exporter(alone), state).keys()


def test_a_larger_model_gives_its_language_model_fields_that_its_file_leaves_out() -> None:
    found = language_fields({"model_type": "mistral3"})
    assert found is not None
    assert found["hidden_size"] == native_config({"model_type": "mistral3"}).text_config.hidden_size
    assert language_fields({"model_type": "llama"}) is None


def test_tensors_outside_of_the_language_model_are_left_out_only_of_a_larger_model_s_files() -> None:
    config = example("llama")
    with torch.device("meta"):
        specs = specs_of(dict(build(config, Stage()).state_dict()))
    files = {f"model.language_model.{name.removeprefix('model.')}": spec for name, spec in specs.items()}
    files["lm_head.weight"] = files.pop("model.language_model.lm_head.weight")
    files["model.vision_tower.weight"] = next(iter(specs.values()))
    stored = TransformersConfig(config=config.config, container="llava")
    graph = StateGraph(importer(config, stored), files)
    graph.check(specs)
    assert list(graph.left_out) == ["model.vision_tower.weight"]
    with pytest.raises(CheckpointError, match="does not give"):
        StateGraph(importer(config, config), files).check(specs)


def test_quantized_weights_of_a_larger_model_are_refused() -> None:
    described = {"model_type": "mistral3", "quantization_config": {"quant_method": "fp8"}}
    with pytest.raises(CheckpointError, match="quantized weights"):
        FORM.config_from_json(described)


@pytest.mark.parametrize(
    ("kind", "name"), [("qwen3_next", "mtp.fc.weight"), ("glm4_moe", "model.layers.92.eh_proj.weight")]
)
def test_tensors_that_a_model_ignores_are_left_out_and_others_are_errors(kind: str, name: str) -> None:
    config = example(kind)
    with torch.device("meta"):
        model = build(config, Stage())
    specs = specs_of(dict(model.state_dict()))
    published = StateGraph(exporter(config), specs).specs
    extra = next(iter(published.values()))
    graph = StateGraph(importer(config, config), {**published, name: extra})
    graph.check(specs)
    assert list(graph.left_out) == [name]
    with pytest.raises(CheckpointError, match="unheard_of"):
        StateGraph(importer(config, config), {**published, "model.unheard_of": extra}).check(specs)
