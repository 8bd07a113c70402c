"""Llama, Mistral, Qwen2 and GLM keep what holds for every model and compute what transformers computes."""

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
from d9d_llama import config as configs
from d9d_llama import hugging_face
from d9d_llama.config import stage_cost
from d9d_llama.model import Glm, Llama
from d9d_llama.plugin import d9d_models
from d9d_nn.rope.scaling import Llama3Scaling, NtkScaling
from d9d_testing.suites.model import ModelSuite
from d9d_testing.suites.plugin import PluginSuite
from d9d_testing.suites.support.models import export_to, random_model
from pydantic import ValidationError

#: Parameters of the published files.
PUBLISHED = {
    "Llama": {
        "1b": 1_235_814_400, "3b": 3_212_749_824, "8b": 8_030_261_248, "70b": 70_553_706_496, "405b": 405_853_388_800,
    },
    "Mistral": {"7b": 7_248_023_552, "7b-v0.1": 7_241_732_096},
    "Qwen2": {
        "0.5b": 494_032_768, "1.5b": 1_543_714_304, "3b": 3_085_938_688, "7b": 7_615_616_512, "14b": 14_770_033_664,
        "32b": 32_763_876_352, "72b": 72_706_203_648,
    },
    "Glm": {"4-9b": 9_399_951_360},
}  # fmt: skip
SPECS = {spec.name: spec for spec in d9d_models()}
SCALING = Llama3Scaling(factor=8.0, original_max_positions=16, low_freq_factor=1.0, high_freq_factor=4.0)
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("Llama", {"rope_scaling": SCALING, "rope_theta": 5e5, "tie_embeddings": True}),
    ("Llama", {"attention_bias": True, "head_dim": 24}),
    ("Llama", {"rope_scaling": NtkScaling(factor=4.0), "rope_theta": 100.0}),
    ("Mistral", {"sliding_window": None, "rms_norm_eps": 1e-5}),
    ("Mistral", {"sliding_window": 3}),
    ("Qwen2", {"num_layers": 3, "sliding_window": 4, "sliding_from_layer": 1, "tie_embeddings": True}),
    ("Glm", {"tie_embeddings": True, "rope_theta": 1e4}),
    ("Glm", {"partial_rotary_factor": 1.0, "attention_bias": False, "rope_scaling": SCALING}),
    ("Glm", {"rope_scaling": NtkScaling(factor=4.0), "head_dim": 16}),
]


def config_of(family: str, **fields: Any) -> Any:
    tiny = getattr(configs, f"tiny_{family.lower()}")()
    return type(tiny).model_validate(tiny.model_dump() | fields)


class Suite(ModelSuite):
    plugin = "d9d_llama.plugin"
    reference = "transformers:AutoModelForCausalLM"
    initial_std: ClassVar = {"*.[qkv]_proj.weight": 0.02, "*.o_proj.weight": 0.01, "*.down_proj.weight": 0.01}


@pytest.mark.thorough
class TestLlama(Suite):
    target = "llama"


@pytest.mark.thorough
class TestMistral(Suite):
    target = "mistral"


@pytest.mark.thorough
class TestQwen2(Suite):
    target = "qwen2"


@pytest.mark.thorough
class TestGlm(Suite):
    target = "glm"


class TestPlugin(PluginSuite):
    plugin = "d9d_llama.plugin"
    builds_on = ("d9d_nn.plugin",)


@pytest.mark.parametrize(("family", "fields"), VARIANTS)
def test_transformers_computes_the_same_from_an_export_and_back(
    family: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    torch.manual_seed(0)  # some draws of weights differ by more than the tolerance
    transformers = pytest.importorskip("transformers")
    config, form = config_of(family, **fields), getattr(hugging_face, f"{family}HuggingFace")()
    model, tokens = random_model(SPECS[family.lower()], config), torch.randint(64, (2, 16))
    export_to(tmp_path, form, config, model, "float32")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert type(theirs).__name__ == f"{family}ForCausalLM"
    torch.testing.assert_close(model(tokens=tokens)["logits"], theirs(tokens).logits, rtol=1e-4, atol=1e-5)
    theirs.save_pretrained(tmp_path / "theirs")
    assert form.config_from_json(json.loads((tmp_path / "theirs" / "config.json").read_text())) == config


@pytest.mark.parametrize("family", ["Llama", "Qwen2"])
def test_transformers_computes_the_same_bidirectional_attention(family: str, tmp_path: Path) -> None:
    """In values and gradients: an encoder made of a decoder, whose files state is_causal."""
    torch.manual_seed(0)
    transformers = pytest.importorskip("transformers")
    heads = {"tags": {"kind": "token_classification", "num_classes": 3}}
    plain = {"heads": heads, "tie_embeddings": False, "sliding_window": None, "attention_mask": "bidirectional"}
    config = config_of(
        family, **{name: value for name, value in plain.items() if family != "Llama" or "sliding" not in name}
    )
    form = getattr(hugging_face, f"{family}HuggingFace")()
    model, tokens = random_model(SPECS[family.lower()], config), torch.randint(64, (2, 16))
    export_to(tmp_path, form, config, model, "float32")
    theirs = transformers.AutoModelForTokenClassification.from_pretrained(tmp_path, dtype=torch.float32)
    found, expected = model(tokens=tokens)["class_logits"], theirs(tokens).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    grad = torch.randn_like(found)
    found.backward(grad)
    expected.backward(grad)
    ours = model.layers["0"].attention.q_proj.weight.grad  # type: ignore[index,union-attr]
    assert ours is not None
    torch.testing.assert_close(ours, theirs.model.layers[0].self_attn.q_proj.weight.grad, rtol=1e-3, atol=1e-5)
    theirs.save_pretrained(tmp_path / "theirs")
    data = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert data["is_causal"] is False
    assert form.config_from_json(data) == config


def test_files_cannot_express_bidirectional_windows_and_keep_other_masks() -> None:
    form = hugging_face.MistralHuggingFace()
    heads = {"tags": {"kind": "token_classification", "num_classes": 3}}
    both = config_of("Mistral", heads=heads, tie_embeddings=False, attention_mask="bidirectional", sliding_window=4)
    refused = "bidirectional attention within a sliding window is not supported for this model"
    with pytest.raises(CheckpointError, match=refused):
        form.config_json(both, "float32")
    published = form.config_json(both.model_copy(update={"attention_mask": "causal"}), "float32")
    assert form.config_from_json(published).attention_mask == "causal"
    with pytest.raises(CheckpointError, match=refused):  # transformers sees one more position to each side
        form.config_from_json(published | {"is_causal": False})
    for mask in ("prefix", "blocks"):
        made = config_of("Mistral", attention_mask=mask)
        assert form.config_from_json(form.config_json(made, "float32")) == made


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("family", "preset"), [(family, name) for family, sizes in PUBLISHED.items() for name in sizes]
)
def test_a_preset_has_the_published_number_of_parameters(family: str, preset: str) -> None:
    config = getattr(configs, f"{family}Config").model_validate({"preset": preset})
    with torch.device("meta"):
        model = Glm(config) if family == "Glm" else Llama(config)
    count = sum(prod(p.shape) for p in model.parameters())
    assert count == PUBLISHED[family][preset]
    blocks = stage_cost(config, Stage(), Share(1, 32)).blocks
    assert sum(block.count * block.parameters for block in blocks) == count


def test_old_files_leave_out_what_transformers_fills_in() -> None:
    form = hugging_face.LlamaHuggingFace()
    data = form.config_json(config_of("Llama", num_key_value_heads=4, rope_theta=1e4), "float32")
    absent = ("rope_theta", "rope_parameters", "tie_word_embeddings", "num_key_value_heads", "head_dim")
    old = {name: value for name, value in data.items() if name not in absent}
    assert form.config_from_json(old | {"pretraining_tp": 1}) == form.config_from_json(data)
    with pytest.raises(CheckpointError, match="sliding_window is 8"):
        form.config_from_json(data | {"sliding_window": 8})


@pytest.mark.parametrize("family", PUBLISHED)
@pytest.mark.parametrize("says", ["nothing", "null"])
def test_heads_that_a_file_does_not_state_are_as_many_as_in_transformers(family: str, says: str) -> None:
    transformers = pytest.importorskip("transformers")
    form = getattr(hugging_face, f"{family}HuggingFace")()
    data = form.config_json(config_of(family, num_attention_heads=32, num_key_value_heads=4), "float32")
    del data["num_key_value_heads"]
    theirs = getattr(transformers, f"{family}Config")(**data)
    stated = data if says == "nothing" else data | {"num_key_value_heads": None, "tie_word_embeddings": None}
    assert form.config_from_json(stated).num_key_value_heads == theirs.num_key_value_heads


def test_words_are_no_truth_values() -> None:
    for family, name in (("Llama", "attention_bias"), ("Qwen2", "use_sliding_window")):
        form = getattr(hugging_face, f"{family}HuggingFace")()
        data = form.config_json(config_of(family), "float32")
        with pytest.raises(CheckpointError, match=f"{name} is 'no'; it must be true or false"):
            form.config_from_json(data | {name: "no"})


def test_fields_that_a_family_lacks_are_refused() -> None:
    for family, fields in (
        ("Llama", {"sliding_window": 4}),
        ("Mistral", {"attention_bias": True}),
        ("Glm", {"sliding_window": 4}),
    ):
        with pytest.raises(ValidationError, match=next(iter(fields))):
            config_of(family, **fields)


def test_shares_that_rotate_no_whole_pairs_are_refused() -> None:
    for share, found in ((0.01, "0 rotated features"), (0.7, "5 rotated features")):
        with pytest.raises(ValidationError, match=f"{share:g} of head_dim = 8 are {found}"):
            config_of("Glm", partial_rotary_factor=share)


def test_the_share_of_rotated_features_may_stand_with_the_rotary_base_or_alone() -> None:
    form, config = hugging_face.GlmHuggingFace(), config_of("Glm", partial_rotary_factor=0.25)
    data = form.config_json(config, "float32")
    assert form.config_from_json({name: value for name, value in data.items() if name != "rope_parameters"}) == config
    assert form.config_from_json(data | {"partial_rotary_factor": None}) == config
    alone = data | {"rope_parameters": {"rope_theta": config.rope_theta}}
    assert form.config_from_json(alone) == config
    assert form.config_from_json(alone | {"partial_rotary_factor": None}).partial_rotary_factor == 0.5
    with pytest.raises(CheckpointError, match="rope_parameters is 'plain'; it must be a mapping or null"):
        form.config_from_json(data | {"rope_parameters": "plain"})
