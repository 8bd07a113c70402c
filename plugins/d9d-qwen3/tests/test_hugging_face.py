"""The same numbers as transformers' own Qwen3, from files that it reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from d9d_core.errors import CheckpointError
from d9d_qwen3.config import Qwen3Config, tiny
from d9d_qwen3.hugging_face import Qwen3HuggingFace
from d9d_qwen3.model import Qwen3
from d9d_testing.tolerances import Tolerance, assert_close_gradients

FORMAT = Qwen3HuggingFace()
CONFIGS = {
    "untied": tiny(),
    "tied": tiny().model_copy(update={"tie_embeddings": True}),
    "wide_heads": tiny().model_copy(update={"head_dim": 24, "num_key_value_heads": 1, "rope_theta": 10_000.0}),
    "one_head_each": tiny().model_copy(update={"num_key_value_heads": 4, "rms_norm_eps": 1e-3}),
}


def random_model(config: Qwen3Config) -> Qwen3:
    """Weights far from their start, norms included, so that nothing cancels."""
    torch.manual_seed(0)
    model = Qwen3(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=1.0 if "norm" in name else 0.0, std=0.2)
    return model


def state_of(model: Qwen3) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.fixture
def transformers() -> Any:
    return pytest.importorskip("transformers")


@pytest.mark.parametrize("variant", CONFIGS)
def test_transformers_computes_the_same_from_the_files(variant: str, tmp_path: Path, transformers: Any) -> None:
    save_file = pytest.importorskip("safetensors.torch").save_file
    config, ours = CONFIGS[variant], random_model(CONFIGS[variant])
    save_file(FORMAT.export_state(config, state_of(ours)), tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(FORMAT.config_json(config, "float32")))
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(theirs).__name__ == "Qwen3ForCausalLM"
    assert theirs.dtype == torch.float32
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]

    tokens = torch.randint(config.vocab_size, (3, 17), generator=torch.Generator().manual_seed(1))
    expected = theirs(tokens).logits
    logits = ours(tokens=tokens)["logits"]
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)

    targets = tokens.roll(-1, dims=1)
    torch.nn.functional.cross_entropy(expected.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    ours(tokens=tokens, targets=targets)["token_loss"].sum().backward()
    gradients = {name: p.grad for name, p in ours.named_parameters()}
    expected_gradients = FORMAT.import_state(config, {name: p.grad for name, p in theirs.named_parameters()})
    assert_close_gradients(gradients, expected_gradients, within=Tolerance(rtol=0, atol=0, angle=1e-8, norm=1e-4))


def test_config_json_is_read_back_from_what_transformers_writes(tmp_path: Path, transformers: Any) -> None:
    config = CONFIGS["wide_heads"]
    theirs = transformers.Qwen3Config.from_dict(FORMAT.config_json(config, "bfloat16"))
    theirs.save_pretrained(tmp_path)
    assert str(theirs.dtype) == "torch.bfloat16"
    assert FORMAT.config_from_json(json.loads((tmp_path / "config.json").read_text())) == config


def test_config_json_of_transformers_4_is_read() -> None:
    data = FORMAT.config_json(CONFIGS["wide_heads"], "float32")
    del data["rope_parameters"]
    assert FORMAT.config_from_json({**data, "rope_scaling": None}) == CONFIGS["wide_heads"]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model_type": "llama"}, "model_type is 'llama', expected 'qwen3'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn"}}, "rope_type"),
    ],
)
def test_variants_we_do_not_compute_are_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        FORMAT.config_from_json({**FORMAT.config_json(tiny(), "float32"), **changes})


def test_incomplete_config_json_says_what_is_missing() -> None:
    data = FORMAT.config_json(tiny(), "float32")
    del data["num_hidden_layers"]
    with pytest.raises(CheckpointError, match="num_hidden_layers"):
        FORMAT.config_from_json(data)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"vocab_size": "many"}, "no qwen3 model has these values: vocab_size: "),
        ({"num_attention_heads": 3}, "num_key_value_heads: .*does not divide"),
        ({"rope_parameters": "default"}, "rope_parameters is 'default', not a mapping"),
    ],
)
def test_config_json_of_an_impossible_model_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        FORMAT.config_from_json({**FORMAT.config_json(tiny(), "float32"), **changes})


def test_unknown_names_are_refused() -> None:
    weight = torch.zeros(1)
    with pytest.raises(CheckpointError, match=r"'layers\.2\.ffn_norm\.weight' is not a parameter of qwen3"):
        FORMAT.export_state(tiny(), {"layers.2.ffn_norm.weight": weight})
    with pytest.raises(CheckpointError, match=r"'visual\.weight' is not a parameter of Qwen3ForCausalLM"):
        FORMAT.import_state(tiny(), {"visual.weight": weight})


def test_a_copy_of_a_tied_head_is_left_out() -> None:
    weight = torch.zeros(64, 32)
    files = {"model.embed_tokens.weight": weight, "lm_head.weight": weight}
    assert FORMAT.import_state(CONFIGS["tied"], files).keys() == {"embedding.weight"}
    assert FORMAT.import_state(CONFIGS["untied"], files).keys() == {"embedding.weight", "head.weight"}


def test_a_stage_exports_its_part() -> None:
    assert FORMAT.export_state(tiny(), {"layers.1.attention.q_norm.weight": torch.zeros(8)}).keys() == {
        "model.layers.1.self_attn.q_norm.weight"
    }


def test_dtypes_that_config_json_cannot_state_are_refused() -> None:
    with pytest.raises(CheckpointError, match="float64"):
        FORMAT.config_json(tiny(), "float64")
