"""Gemma 2 and 3 keep what holds for every model and compute what transformers computes."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from d9d_core.cost import Share
from d9d_core.errors import CheckpointError
from d9d_core.model import Stage
from d9d_gemma.config import GemmaConfig, stage_cost, tiny
from d9d_gemma.hugging_face import GemmaHuggingFace
from d9d_gemma.model import Gemma
from d9d_gemma.plugin import d9d_models
from d9d_testing.suites.model import ModelSuite
from d9d_testing.suites.plugin import PluginSuite
from d9d_testing.suites.support.models import export_to, initialised, microbatch, random_model
from pydantic import ValidationError
from safetensors.torch import load_file

#: Parameters of the published files; of the larger Gemma 3, without the image encoder and the projection behind it.
PUBLISHED = {
    "2-2b": 2_614_341_888, "2-9b": 9_241_705_984, "2-27b": 27_227_128_320, "3-270m": 268_098_176,
    "3-1b": 999_885_952, "3-4b": 3_880_263_168, "3-12b": 11_766_034_176, "3-27b": 27_009_346_304,
}  # fmt: skip
(SPEC,) = d9d_models()
FORM = GemmaHuggingFace()
TINY = {2: tiny(2), 3: tiny()}
SIX = ("sliding_attention",) * 5 + ("full_attention",)
VARIANTS: list[tuple[int, dict[str, Any]]] = [
    (2, {"num_layers": 3, "logit_softcap": 5.0}),
    (2, {"score_softcap": None, "logit_softcap": None, "tie_embeddings": False}),
    (2, {"rope_scaling": {"type": "linear", "factor": 4.0}, "head_dim": 24, "attention_bias": True}),
    (3, {"num_layers": 7, "layer_types": SIX, "sliding_window": 3}),
    (3, {"rope_scaling": None, "logit_softcap": None, "query_pre_attn_scalar": 8, "tie_embeddings": False}),
    (3, {"local_rope_theta": None, "layer_types": ("full_attention", "sliding_attention")}),
]


def config_of(generation: int, **fields: Any) -> GemmaConfig:
    return GemmaConfig.model_validate(TINY[generation].model_dump() | fields)


class Suite(ModelSuite):
    plugin = "d9d_gemma.plugin"
    target = "gemma"
    reference = "transformers:AutoModelForCausalLM"
    depth_scaled = False  # norms follow attention and feed-forward, so all blocks write equally much
    initial_std: ClassVar = {"*.[qkv]_proj.weight": 0.02, "*.o_proj.weight": 0.01, "*norm.weight": 0.0}


@pytest.mark.thorough
class TestGemma3(Suite):
    pass


@pytest.mark.thorough
class TestGemma2(Suite):
    @pytest.fixture
    def config(self) -> GemmaConfig:  # type: ignore[override]
        return tiny(2)


class TestPlugin(PluginSuite):
    plugin = "d9d_gemma.plugin"
    builds_on = ("d9d_nn.plugin",)


@pytest.mark.parametrize(("generation", "fields"), VARIANTS)
def test_transformers_computes_the_same_from_an_export_and_back(
    generation: int, fields: dict[str, Any], tmp_path: Path
) -> None:
    torch.manual_seed(0)  # some draws of weights differ by more than the tolerance
    transformers = pytest.importorskip("transformers")
    config = config_of(generation, **fields)
    model, tokens = random_model(SPEC, config), torch.randint(64, (2, 16))
    export_to(tmp_path, FORM, config, model, "float32")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert type(theirs).__name__ == f"Gemma{generation}ForCausalLM"
    torch.testing.assert_close(model(tokens=tokens)["logits"], theirs(tokens).logits, rtol=1e-4, atol=1e-5)
    theirs.save_pretrained(tmp_path / "theirs")
    assert FORM.config_from_json(json.loads((tmp_path / "theirs" / "config.json").read_text())) == config
    ours, saved = (load_file(at / "model.safetensors") for at in (tmp_path, tmp_path / "theirs"))
    assert ours.keys() == saved.keys()
    assert all(torch.equal(ours[name], saved[name]) for name in ours)


def test_transformers_computes_the_same_bidirectional_attention(tmp_path: Path) -> None:
    """Of EmbeddingGemma, with its windows in both directions."""
    torch.manual_seed(0)
    transformers = pytest.importorskip("transformers")
    heads = {"topic": {"kind": "classification", "num_classes": 3}}
    config = config_of(3, heads=heads, tie_embeddings=False, attention_mask="bidirectional", num_layers=3)
    model, tokens = random_model(SPEC, config), torch.randint(64, (1, 16))
    export_to(tmp_path, FORM, config, model, "float32")
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=torch.float32)
    logits = model(tokens=tokens)["class_logits"]
    torch.testing.assert_close(logits, theirs(tokens).logits, rtol=1e-4, atol=1e-5)
    causal = random_model(SPEC, config.model_copy(update={"attention_mask": "causal"}))
    causal.load_state_dict(model.state_dict())
    assert not torch.allclose(causal(tokens=tokens)["class_logits"], logits, rtol=1e-3)
    theirs.save_pretrained(tmp_path / "theirs")
    assert FORM.config_from_json(json.loads((tmp_path / "theirs" / "config.json").read_text())) == config


@pytest.mark.thorough
@pytest.mark.parametrize("preset", PUBLISHED)
def test_a_preset_has_the_published_number_of_parameters(preset: str) -> None:
    config = GemmaConfig.model_validate({"preset": preset})
    with torch.device("meta"):
        model = Gemma(config)
    count = sum(prod(p.shape) for p in model.parameters())
    assert count == PUBLISHED[preset]
    blocks = stage_cost(config, Stage(), Share(1, 32)).blocks
    assert sum(block.count * block.parameters for block in blocks) == count
    assert FORM.config_from_json(FORM.config_json(config, "bfloat16")) == config.model_copy(update={"preset": None})


@pytest.mark.parametrize("generation", [2, 3])
def test_a_tied_pipeline_has_the_loss_and_gradients_of_one_process(generation: int) -> None:
    config = config_of(generation, num_layers=5)
    whole, batch = random_model(SPEC, config), microbatch(config)
    stages = [Gemma(config, Stage(index, 2)) for index in range(2)]
    tensors = dict(whole.named_parameters())
    for stage in stages:
        for name, parameter in stage.named_parameters():
            parameter.data.copy_(tensors[name].data)
    assert "embedding.weight" in dict(stages[1].named_parameters())
    expected = whole(**batch)["token_loss"]
    expected.sum().backward()
    first = {name: batch[name] for name in ("tokens", "positions", "documents")}
    between = stages[0](**first)
    found = stages[1](**between, **{name: batch[name] for name in ("positions", "documents", "targets")})["token_loss"]
    found.sum().backward()
    assert torch.equal(found, expected)
    for name, parameter in tensors.items():
        held = [dict(stage.named_parameters()).get(name) for stage in stages]
        total = sum(one.grad for one in held if one is not None and one.grad is not None)
        torch.testing.assert_close(total, parameter.grad)


def test_embeddings_are_scaled_by_a_number_of_their_dtype() -> None:
    config, tokens = config_of(3, hidden_size=20, head_dim=8), torch.arange(4).unsqueeze(0)
    for dtype, scale in ((torch.float64, 20**0.5), (torch.bfloat16, 4.46875)):
        model = initialised(SPEC, config).to(dtype)
        assert isinstance(model, Gemma)
        rows = model.embedding.weight[:4]
        assert torch.equal(model.embed(tokens)[0], rows * torch.tensor(scale, dtype=dtype))


def published(generation: int, **fields: Any) -> dict[str, Any]:
    """Contents of a ``config.json`` that transformers 4 wrote, which leaves out some defaults."""
    new = {"rope_parameters", "rope_scaling", "layer_types", "tie_word_embeddings", "dtype", "d9d"}
    written = FORM.config_json(config_of(generation, num_layers=12), "bfloat16")
    kept = {name: value for name, value in written.items() if name not in new and value is not None}
    common = {"cache_implementation": "hybrid", "attention_dropout": 0.0, "transformers_version": "4.50.0"}
    return kept | common | fields


def test_files_of_transformers_4_are_read() -> None:
    second = published(2, sliding_window_size=4096)
    assert FORM.config_from_json(second) == config_of(2, num_layers=12)
    for name in ("rope_theta", "attn_logit_softcapping", "final_logit_softcapping"):
        del second[name]
    found = FORM.config_from_json(second)
    assert (found.rope_theta, found.score_softcap, found.logit_softcap) == (1e4, 50.0, 30.0)
    scaling = {"rope_type": "linear", "factor": 8.0}
    third = published(3, rope_scaling=scaling, rope_theta=1e6, sliding_window_pattern=6, attn_logit_softcapping=None)
    assert FORM.config_from_json(third) == config_of(3, num_layers=12, layer_types=SIX)
    del third["sliding_window_pattern"], third["rope_theta"], third["rope_local_base_freq"]
    assert FORM.config_from_json(third) == config_of(3, num_layers=12, layer_types=SIX)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (published(2, use_bidirectional_attention=True), "use_bidirectional_attention is True"),
        (published(3, use_bidirectional_attention=True), "the causal_lm head 'causal_lm' sees the tokens"),
        (published(3, is_causal=False), "is_causal is False"),
        (published(2, is_causal=False, architectures=["Gemma2Model"]), "within a sliding window is not supported"),
        (published(3, attn_logit_softcapping=50.0), "attn_logit_softcapping is 50.0"),
        (published(2, hidden_activation="gelu"), "hidden_activation is 'gelu'"),
        (published(2, rope_local_base_freq=1e4), "rope_local_base_freq is 10000.0"),
        (published(3, layer_types=["full_attention"]), "layer_types has 1 entries"),
        (published(3, model_type="gemma3"), "model_type is 'gemma3', not 'gemma2'"),
    ],
)
def test_what_gemma_does_not_compute_is_refused(data: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        FORM.config_from_json(data)


def test_fields_that_a_generation_lacks_are_refused() -> None:
    for generation, fields in ((2, {"local_rope_theta": 1e3}), (3, {"score_softcap": 1.0})):
        name = next(iter(fields))
        with pytest.raises(ValidationError, match=f"{generation} has no {name}; .* set generation to {5 - generation}"):
            config_of(generation, **fields)


def test_each_model_type_has_an_example() -> None:
    assert {FORM.family_of(FORM.example(kind)).model_type for kind in SPEC.model_types} == SPEC.model_types
