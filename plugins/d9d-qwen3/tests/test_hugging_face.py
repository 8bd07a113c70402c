"""The same numbers as transformers' own Qwen3, from files that it reads, and files that it wrote."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from d9d_core.errors import CheckpointError
from d9d_nn.heads.config import (
    CausalLMHeadConfig,
    ClassificationHeadConfig,
    EmbeddingHeadConfig,
    TokenClassificationHeadConfig,
)
from d9d_nn.rope.scaling import DynamicScaling, LinearScaling, Llama3Scaling, YarnScaling
from d9d_qwen3.config import Qwen3Config, tiny
from d9d_qwen3.hugging_face.dense import Qwen3HuggingFace
from d9d_qwen3.model import Qwen3
from d9d_testing.suites.support.models import export_to
from d9d_testing.tolerances import TOLERANCES, Tolerance, assert_close_gradients, compare_directions
from d9d_weights.graph.graph import StateGraph, map_tensors, specs_of
from d9d_weights.hugging_face.directory import ModelDirectory
from d9d_weights.hugging_face.load import check_duplicates, load_tensors
from torch import Tensor, nn

FORMAT = Qwen3HuggingFace()
CLASSIFIER = ClassificationHeadConfig(num_classes=3)


def changed(**fields: Any) -> Qwen3Config:
    return Qwen3Config.model_validate(tiny().model_dump() | fields)


def scaled_down(preset: str) -> Qwen3Config:
    """A preset whose widths are an eighth and whose layers are few; proportions, ties and constants stay."""
    published = Qwen3Config.model_validate({"preset": preset})
    return Qwen3Config.model_validate(
        published.model_dump()
        | {
            "preset": None,
            "vocab_size": 512,
            "hidden_size": published.hidden_size // 16,
            "intermediate_size": published.intermediate_size // 16,
            "num_layers": 2,
            "head_dim": 16,
        }
    )


CONFIGS = {
    "tied": changed(tie_embeddings=True),
    "wide_heads": changed(head_dim=24, num_key_value_heads=1, rope_theta=10_000.0),
    "one_head_each": changed(num_key_value_heads=4, rms_norm_eps=1e-3),
    "bias": changed(attention_bias=True),
    "window": changed(num_layers=3, sliding_window=4, sliding_from_layer=1),
    "linear": changed(rope_scaling=LinearScaling(factor=3.0)),
    "dynamic": changed(rope_scaling=DynamicScaling(factor=2.0, original_max_positions=8), max_positions=64),
    "yarn": changed(rope_scaling=YarnScaling(factor=4.0, original_max_positions=16)),
    "llama3": changed(
        rope_scaling=Llama3Scaling(factor=8.0, original_max_positions=16, low_freq_factor=1.0, high_freq_factor=4.0)
    ),
    "added_tokens": changed(added_tokens=5),
    "named_tokens": changed(added_tokens={"images": 3, "tools": 2}),
    "added_tokens_tied": changed(added_tokens=5, tie_embeddings=True),
    **{preset: scaled_down(preset) for preset in ("0.6b", "1.7b", "4b", "8b", "14b", "32b")},
}


def random_model(config: Qwen3Config, dtype: torch.dtype = torch.float32) -> Qwen3:
    """Weights far from their start, norms included, so that nothing cancels."""
    torch.manual_seed(0)
    model = Qwen3(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=1.0 if "norm" in name else 0.0, std=parameter.shape[-1] ** -0.5)
    return model.to(dtype)


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def ours_of(config: Qwen3Config, theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return map_tensors(FORMAT.importer(config, config), theirs)


@pytest.fixture
def transformers() -> Any:
    return pytest.importorskip("transformers")


def loaded(cls: Any, directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Their model from our files; nothing in them may be missing or too much."""
    theirs, report = cls.from_pretrained(directory, output_loading_info=True, dtype=dtype)
    assert theirs.dtype == dtype
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    return theirs.train(mode=False)


def assert_near(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    if dtype == torch.float32:
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    else:
        limit = TOLERANCES[dtype]
        assert_close_gradients({"output": actual.float()}, {"output": expected.float()}, within=limit)


def assert_gradients_agree(
    ours: nn.Module, theirs: nn.Module, exact: Callable[[], dict[str, Tensor]], config: Qwen3Config, dtype: torch.dtype
) -> None:
    """Every parameter. In bfloat16, ours must be about as near to the exact one as theirs."""
    found, reference = gradients_of(ours), ours_of(config, gradients_of(theirs))
    if dtype == torch.float32:
        assert_close_gradients(found, reference, within=Tolerance(rtol=0, atol=0, angle=1e-8, norm=1e-4))
        return
    limit, truth = TOLERANCES[dtype], exact()
    assert found.keys() == reference.keys() == truth.keys()
    for name, gradient in truth.items():
        (angle, norm), (angle_there, norm_there) = (compare_directions(g[name], gradient) for g in (found, reference))
        assert angle <= max(limit.angle, 2 * angle_there), f"{name}: 1-cos {angle:.1e}, theirs {angle_there:.1e}"
        assert norm <= max(limit.norm, 2 * norm_there), f"{name}: norm off by {norm:.1e}, theirs {norm_there:.1e}"


BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


@pytest.mark.thorough
@BOTH
@pytest.mark.parametrize("variant", CONFIGS)
def test_language_models_agree_in_logits_and_every_gradient(
    variant: str, dtype: torch.dtype, tmp_path: Path, transformers: Any
) -> None:
    config = CONFIGS[variant]
    ours = random_model(config, dtype)
    export_to(tmp_path, FORMAT, config, ours, str(dtype).removeprefix("torch."))
    theirs = loaded(transformers.AutoModelForCausalLM, tmp_path, dtype)
    assert type(theirs).__name__ == "Qwen3ForCausalLM"
    tokens = torch.randint(config.vocab_size, (3, 17), generator=torch.Generator().manual_seed(1))
    expected = theirs(tokens).logits
    assert_near(ours(tokens=tokens)["logits"], expected, dtype)
    targets = tokens.roll(-1, dims=1)
    nn.functional.cross_entropy(expected.float().flatten(0, 1), targets.flatten(), reduction="sum").backward()
    ours(tokens=tokens, targets=targets)["token_loss"].sum().backward()

    def exact() -> dict[str, Tensor]:
        model = random_model(config, dtype).float()
        model(tokens=tokens, targets=targets)["token_loss"].sum().backward()
        return gradients_of(model)

    assert_gradients_agree(ours, theirs, exact, config, dtype)


@BOTH
def test_classifiers_agree_on_padded_samples(dtype: torch.dtype, tmp_path: Path, transformers: Any) -> None:
    config = changed(heads={"topic": CLASSIFIER})
    ours = random_model(config, dtype)
    export_to(tmp_path, FORMAT, config, ours, str(dtype).removeprefix("torch."))
    theirs = loaded(transformers.AutoModelForSequenceClassification, tmp_path, dtype)
    theirs.config.pad_token_id = config.vocab_size - 1
    tokens = torch.randint(config.vocab_size - 1, (3, 9), generator=torch.Generator().manual_seed(1))
    lengths = torch.tensor([9, 4, 1])
    tokens[torch.arange(9) >= lengths[:, None]] = config.vocab_size - 1
    expected = theirs(tokens, attention_mask=(torch.arange(9) < lengths[:, None]).long()).logits
    found = ours(tokens=tokens, lengths=lengths)["class_logits"]
    assert_near(found, expected.float(), dtype)
    labels = torch.tensor([0, 2, 1])
    nn.functional.cross_entropy(expected.float(), labels, reduction="sum").backward()
    nn.functional.cross_entropy(found, labels, reduction="sum").backward()

    def exact() -> dict[str, Tensor]:
        model = random_model(config, dtype).float()
        logits = model(tokens=tokens, lengths=lengths)["class_logits"]
        nn.functional.cross_entropy(logits, labels, reduction="sum").backward()
        return gradients_of(model)

    assert_gradients_agree(ours, theirs, exact, config, dtype)


@BOTH
def test_classifiers_of_tokens_agree_and_come_back(dtype: torch.dtype, tmp_path: Path, transformers: Any) -> None:
    config = changed(heads={"tags": TokenClassificationHeadConfig(num_classes=3)})
    ours = random_model(config, dtype)
    with torch.no_grad():
        ours.get_parameter("heads.tags.bias").normal_()
    export_to(tmp_path, FORMAT, config, ours, str(dtype).removeprefix("torch."))
    theirs = loaded(transformers.AutoModelForTokenClassification, tmp_path, dtype).eval()
    assert type(theirs).__name__ == "Qwen3ForTokenClassification"
    tokens = torch.randint(config.vocab_size, (3, 9), generator=torch.Generator().manual_seed(1))
    expected = theirs(tokens).logits
    assert_near(ours(tokens=tokens)["class_logits"], expected.float(), dtype)
    theirs.save_pretrained(tmp_path / "theirs")
    stored = FORMAT.config_from_json(json.loads((tmp_path / "theirs" / "config.json").read_text()))
    assert [(head.kind, head.num_classes) for head in stored.heads.values()] == [("token_classification", 3)]
    again, _ = into_model(tmp_path / "theirs", stored)
    assert torch.equal(again.to(dtype)(tokens=tokens)["class_logits"], ours(tokens=tokens)["class_logits"])


@BOTH
def test_embeddings_agree(dtype: torch.dtype, tmp_path: Path, transformers: Any) -> None:
    """Last tokens of the bare backbone, normalised, as embedding models are published."""
    config = changed(heads={"vector": EmbeddingHeadConfig()})
    ours = random_model(config, dtype)
    export_to(tmp_path, FORMAT, config, ours, str(dtype).removeprefix("torch."))
    theirs = loaded(transformers.AutoModel, tmp_path, dtype)
    assert type(theirs).__name__ == "Qwen3Model"
    tokens = torch.randint(config.vocab_size, (3, 9), generator=torch.Generator().manual_seed(1))
    expected = nn.functional.normalize(theirs(tokens).last_hidden_state[:, -1].float(), dim=-1)
    found = ours(tokens=tokens)["embedding"]
    assert_near(found, expected, dtype)
    direction = torch.randn(found.shape, generator=torch.Generator().manual_seed(2))
    (expected * direction).sum().backward()
    (found * direction).sum().backward()

    def exact() -> dict[str, Tensor]:
        model = random_model(config, dtype).float()
        (model(tokens=tokens)["embedding"] * direction).sum().backward()
        return gradients_of(model)

    assert_gradients_agree(ours, theirs, exact, config, dtype)


def into_model(directory: Path, config: Qwen3Config) -> tuple[Qwen3, StateGraph]:
    """A model that starts from a directory, as a job does."""
    model = random_model(config)
    with ModelDirectory.open(directory) as opened:
        graph = StateGraph(FORMAT.importer(config, FORMAT.config_from_json(opened.config())), opened.specs)
        graph.check(specs_of(state_of(model)))
        load_tensors(graph, opened, {n: p for n, p in model.named_parameters() if n in graph.outputs})
    return model, graph


def published(transformers: Any, directory: Path, cls: str = "Qwen3ForCausalLM", **fields: Any) -> Any:
    """A model that transformers wrote."""
    torch.manual_seed(3)
    config = transformers.Qwen3Config.from_dict(FORMAT.config_json(tiny(), "float32") | fields)
    model = getattr(transformers, cls)(config)
    model.save_pretrained(directory)
    return model


@pytest.mark.parametrize("tied", [True, False])
def test_files_of_transformers_are_read(tied: bool, tmp_path: Path, transformers: Any) -> None:
    theirs = published(transformers, tmp_path, tie_word_embeddings=tied)
    config = FORMAT.config_from_json(json.loads((tmp_path / "config.json").read_text()))
    assert config == changed(tie_embeddings=tied)
    ours, graph = into_model(tmp_path, config)
    tokens = torch.randint(64, (2, 9))
    torch.testing.assert_close(ours(tokens=tokens)["logits"], theirs(tokens).logits, rtol=1e-5, atol=1e-5)
    assert not graph.fresh


def test_a_bare_backbone_is_read(tmp_path: Path, transformers: Any) -> None:
    theirs = published(transformers, tmp_path, "Qwen3Model", architectures=["Qwen3Model"])
    config = FORMAT.config_from_json(json.loads((tmp_path / "config.json").read_text()))
    ours, _ = into_model(tmp_path, config)
    tokens = torch.randint(64, (2, 9))
    expected = nn.functional.normalize(theirs(tokens).last_hidden_state[:, -1], dim=-1)
    torch.testing.assert_close(ours(tokens=tokens)["embedding"], expected, rtol=1e-5, atol=1e-5)


def test_a_tied_head_can_be_untied_and_others_start_anew(tmp_path: Path, transformers: Any) -> None:
    theirs = published(transformers, tmp_path, tie_word_embeddings=True)
    config = changed(heads={"causal_lm": CausalLMHeadConfig(), "topic": CLASSIFIER})
    ours, graph = into_model(tmp_path, config)
    assert graph.fresh == {"heads.topic.weight"}
    words = theirs.get_input_embeddings().weight
    assert torch.equal(ours.get_parameter("embedding.weight"), words)
    assert torch.equal(ours.get_parameter("heads.causal_lm.weight"), words)


def test_a_head_of_its_own_becomes_tied_only_if_it_equals_the_embedding(tmp_path: Path, transformers: Any) -> None:
    theirs = published(transformers, tmp_path)
    with ModelDirectory.open(str(tmp_path)) as directory:
        graph = StateGraph(FORMAT.importer(CONFIGS["tied"], changed()), directory.specs)
        with pytest.raises(CheckpointError, match="set model.tie_embeddings to false"):
            check_duplicates(graph, directory)
    theirs.lm_head.weight = torch.nn.Parameter(theirs.get_input_embeddings().weight.detach().clone())
    theirs.save_pretrained(tmp_path)
    with ModelDirectory.open(str(tmp_path)) as directory:
        check_duplicates(graph, directory)


def test_added_tokens_are_cut_off_or_new(tmp_path: Path, transformers: Any) -> None:
    theirs = published(transformers, tmp_path)
    words = theirs.get_input_embeddings().weight
    inside, graph = into_model(tmp_path, changed(added_tokens=4))
    assert torch.equal(inside.get_parameter("embedding.added.weight"), words[60:])
    assert not graph.fresh
    beyond, graph = into_model(tmp_path, changed(added_tokens=4, vocab_size=68))
    assert torch.equal(beyond.get_parameter("embedding.regular.weight"), words)
    assert graph.fresh == {"embedding.added.weight", "heads.causal_lm.added.weight"}
    with pytest.raises(CheckpointError, match=r"\[64, 32\] in the checkpoint .* but \[66, 32\] in the model"):
        into_model(tmp_path, changed(added_tokens=4, vocab_size=70))


def test_a_copy_of_a_tied_head_and_old_buffers_are_left_out() -> None:
    exported = map_tensors(FORMAT.exporter(CONFIGS["tied"]), state_of(random_model(CONFIGS["tied"])))
    assert "lm_head.weight" not in exported
    files = exported | {
        "lm_head.weight": exported["model.embed_tokens.weight"],
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
    }
    assert ours_of(CONFIGS["tied"], files).keys() == state_of(random_model(CONFIGS["tied"])).keys()


HEADS = {
    "two language models": changed(heads={"a": CausalLMHeadConfig(), "b": CausalLMHeadConfig()}),
    "several": changed(
        heads={
            "topic": CLASSIFIER,
            "lm": CausalLMHeadConfig(),
            "mood": ClassificationHeadConfig(num_classes=2, pooling="mean", layers=[0, -1]),
            "vector": EmbeddingHeadConfig(dim=8),
        },
        added_tokens=3,
        tie_embeddings=True,
    ),
    "mean classifier": changed(heads={"mood": ClassificationHeadConfig(num_classes=2, pooling="mean")}),
}


@pytest.mark.thorough
@pytest.mark.parametrize("config", [*CONFIGS.values(), *HEADS.values()], ids=[*CONFIGS, *HEADS])
def test_what_is_exported_is_read_back(config: Qwen3Config, tmp_path: Path) -> None:
    model = random_model(config)
    export_to(tmp_path, FORMAT, config, model, "float32")
    read = FORMAT.config_from_json(json.loads((tmp_path / "config.json").read_text()))
    assert read == config
    again, graph = into_model(tmp_path, read)
    assert not graph.fresh
    assert all(torch.equal(again.get_parameter(name), tensor) for name, tensor in state_of(model).items())


def test_config_json_survives_transformers(tmp_path: Path, transformers: Any) -> None:
    """transformers writes the config that it read, in its own form."""
    for variant, config in (CONFIGS | HEADS).items():
        theirs = transformers.Qwen3Config.from_dict(FORMAT.config_json(config, "bfloat16"))
        theirs.save_pretrained(tmp_path)
        assert str(theirs.dtype) == "torch.bfloat16"
        data = json.loads((tmp_path / "config.json").read_text())
        data.setdefault("architectures", FORMAT.config_json(config, "bfloat16")["architectures"])
        assert FORMAT.config_from_json(data) == config, variant


def test_config_json_of_transformers_4_is_read() -> None:
    for variant in ("wide_heads", "yarn", "linear"):
        data = FORMAT.config_json(CONFIGS[variant], "float32")
        del data["rope_parameters"], data["layer_types"]
        if data["rope_scaling"] is not None:
            data["rope_scaling"]["type"] = data["rope_scaling"].pop("rope_type")
        assert FORMAT.config_from_json(data) == CONFIGS[variant]


def test_windows_of_transformers_4_are_read() -> None:
    data = FORMAT.config_json(CONFIGS["window"], "float32")
    del data["layer_types"]
    assert FORMAT.config_from_json(data) == CONFIGS["window"]
    without = FORMAT.config_from_json(data | {"use_sliding_window": False})
    assert without.sliding_window is None


def test_a_window_that_is_switched_off_is_none() -> None:
    """As in transformers, whatever the kinds of layers are."""
    data = FORMAT.config_json(CONFIGS["window"], "float32")
    assert FORMAT.config_from_json(data | {"use_sliding_window": False}).sliding_window is None


def test_a_window_without_details_is_that_of_transformers() -> None:
    data = FORMAT.config_json(changed(num_layers=30), "float32")
    for name in ("layer_types", "sliding_window", "max_window_layers"):
        del data[name]
    config = FORMAT.config_from_json(data | {"use_sliding_window": True})
    assert (config.sliding_window, config.sliding_from_layer) == (4096, 28)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model_type": "llama"}, "model_type is 'llama', not 'qwen3'"),
        ({"architectures": ["Qwen3ForQuestionAnswering"]}, "architecture Qwen3ForQuestionAnswering is not one"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "longrope", "factor": 2.0}}, "rope_parameters"),
        ({"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}, "full_attention first"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "full_attention first"),
        ({"vocab_size": "many"}, "values are invalid for a qwen3 model: vocab_size: "),
        ({"num_attention_heads": 3}, "num_key_value_heads: .*does not divide"),
        ({"rope_parameters": "default"}, "rope_parameters is 'default'; it must be a mapping or null"),
        ({"quantization_config": {"quant_method": "fp8"}}, "weights are quantized"),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1; .* set it to 0"),
        ({"num_hidden_layers": "28", "layer_types": None}, "a wrong type for a qwen3 model"),
        ({"layer_types": 5}, "a wrong type for a qwen3 model"),
        ({"architectures": 5}, "a wrong type for a qwen3 model"),
        ({"architectures": "LlamaForCausalLM"}, "architecture LlamaForCausalLM is not one"),
        ({"d9d": [1]}, "a wrong type for a qwen3 model"),
    ],
)
def test_configs_we_do_not_compute_are_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        FORMAT.config_from_json({**FORMAT.config_json(tiny(), "float32"), **changes})


def test_incomplete_config_json_says_what_is_missing() -> None:
    data = FORMAT.config_json(tiny(), "float32")
    del data["num_hidden_layers"]
    with pytest.raises(CheckpointError, match="num_hidden_layers"):
        FORMAT.config_from_json(data)


def test_foreign_tensors_and_missing_ones_are_named() -> None:
    exported = map_tensors(FORMAT.exporter(tiny()), state_of(random_model(tiny())))
    specs = specs_of(exported)
    with pytest.raises(CheckpointError, match=r"no mapper takes 'visual\.weight'"):
        StateGraph(FORMAT.importer(tiny(), tiny()), specs | {"visual.weight": specs["lm_head.weight"]})
    del specs["model.norm.weight"]
    with pytest.raises(CheckpointError, match=r"needs 'model\.norm\.weight'"):
        StateGraph(FORMAT.importer(tiny(), tiny()), specs)


def test_dtypes_that_config_json_cannot_state_are_refused() -> None:
    with pytest.raises(CheckpointError, match="float64"):
        FORMAT.config_json(tiny(), "float64")
