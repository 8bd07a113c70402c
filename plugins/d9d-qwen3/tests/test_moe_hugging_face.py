"""The same numbers as transformers' own Qwen3-MoE, from files that it reads, and files that it wrote."""

from __future__ import annotations

import copy
import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from d9d_core.errors import CheckpointError
from d9d_core.job import JobFile
from d9d_core.registry.registry import Registry
from d9d_core.types import TensorSpec
from d9d_moe.balancing.config import AuxiliaryLossConfig, BiasUpdateConfig
from d9d_nn.heads.config import ClassificationHeadConfig, EmbeddingHeadConfig
from d9d_nn.rope.scaling import YarnScaling
from d9d_qwen3.hugging_face.moe import Qwen3MoeHuggingFace
from d9d_qwen3.model import Qwen3
from d9d_qwen3.moe_config import Qwen3MoeConfig, tiny
from d9d_testing.tolerances import (
    TOLERANCES,
    Tolerance,
    assert_close_gradients,
    assert_close_values,
    compare_directions,
)
from d9d_weights.graph.graph import StateGraph, map_tensors, specs_of
from d9d_weights.hugging_face.directory import ModelDirectory
from d9d_weights.hugging_face.export import ModelFiles, export_model
from d9d_weights.hugging_face.load import load_tensors
from d9d_weights.hugging_face.writer import ModelWriter
from d9d_weights.sharding.model_tensors import model_tensors
from torch import Tensor, nn

FORMAT = Qwen3MoeHuggingFace()
BIASED = {"balancing": (BiasUpdateConfig(),)}


def changed(**fields: Any) -> Qwen3MoeConfig:
    return Qwen3MoeConfig.model_validate(tiny().model_dump() | fields)


def scaled_down(preset: str) -> Qwen3MoeConfig:
    """A preset of a sixteenth of the experts and few layers, narrow; proportions and constants stay."""
    published = Qwen3MoeConfig.model_validate({"preset": preset})
    return Qwen3MoeConfig.model_validate(
        published.model_dump()
        | {
            "preset": None,
            "vocab_size": 512,
            "hidden_size": published.hidden_size // 64,
            "intermediate_size": published.intermediate_size // 64,
            "moe_intermediate_size": published.moe_intermediate_size // 64,
            "num_experts": published.num_experts // 4,
            "num_layers": 2,
            "head_dim": 8,
        }
    )


CONFIGS = {
    "tiny": tiny(),
    "not_renormalised": changed(renormalise=False),
    "dense_layers": changed(num_layers=4, dense_layers=[0, 2], intermediate_size=40),
    "one_expert": changed(experts_per_token=1, renormalise=False),
    "all_experts": changed(num_experts=4, experts_per_token=4),
    "window": changed(sliding_window=4),
    "tied": changed(tie_embeddings=True),
    "bias": changed(attention_bias=True, head_dim=12),
    "yarn": changed(rope_scaling=YarnScaling(factor=4.0, original_max_positions=16)),
    **{preset: scaled_down(preset) for preset in ("30b-a3b", "235b-a22b")},
}


def random_model(config: Qwen3MoeConfig, dtype: torch.dtype = torch.float32) -> Qwen3:
    """Weights far from their start, norms included, so that nothing cancels; routers that are sure of themselves."""
    torch.manual_seed(0)
    model = Qwen3(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            inside = parameter.shape[-2] if ".experts." in name else parameter.shape[-1]
            parameter.normal_(mean=1.0 if "norm" in name else 0.0, std=inside**-0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("selection_bias"):
                buffer.normal_(std=0.1)
    return model.to(dtype)


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in model_tensors(model).items()}


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def export_to(directory: Path, config: Qwen3MoeConfig, model: Qwen3, dtype: str = "float32") -> None:
    """As a job does at its end."""
    state = state_of(model)
    graph = StateGraph(FORMAT.exporter(config), specs_of(state))
    export_model(ModelWriter(directory, graph.specs), graph, state, ModelFiles(FORMAT.config_json(config, dtype)))


def into_model(directory: Path, config: Qwen3MoeConfig) -> tuple[Qwen3, StateGraph]:
    """A model that starts from a directory, as a job does."""
    model = random_model(config)
    with ModelDirectory.open(directory) as opened:
        graph = StateGraph(FORMAT.importer(config, FORMAT.config_from_json(opened.config())), opened.specs)
        graph.check(specs_of(state_of(model)))
        load_tensors(graph, opened, {n: t for n, t in model_tensors(model).items() if n in graph.outputs})
    return model, graph


def config_of(directory: Path) -> Qwen3MoeConfig:
    return FORMAT.config_from_json(json.loads((directory / "config.json").read_text()))


def names_in(directory: Path) -> set[str]:
    with ModelDirectory.open(directory) as opened:
        return set(opened.specs)


@pytest.fixture
def transformers() -> Any:
    return pytest.importorskip("transformers")


def loaded(cls: Any, directory: Path, dtype: torch.dtype = torch.float32, unexpected: set[str] = frozenset()) -> Any:
    """Their model from our files; nothing in them may be missing or too much."""
    theirs, report = cls.from_pretrained(directory, output_loading_info=True, dtype=dtype)
    assert theirs.dtype == dtype
    assert not report["missing_keys"]
    assert set(report["unexpected_keys"]) == unexpected
    assert not report["mismatched_keys"]
    return theirs.train(mode=False)


def some_tokens(config: Qwen3MoeConfig) -> Tensor:
    return torch.randint(config.vocab_size, (3, 17), generator=torch.Generator().manual_seed(1))


def train_on(model: Qwen3, tokens: Tensor) -> dict[str, Tensor]:
    """Gradients of predicting the next token."""
    model(tokens=tokens, targets=tokens.roll(-1, dims=1))["token_loss"].sum().backward()
    return gradients_of(model)


def train_theirs_on(theirs: Any, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits, and gradients under their names."""
    logits = theirs(tokens).logits
    targets = tokens.roll(-1, dims=1).flatten()
    nn.functional.cross_entropy(logits.float().flatten(0, 1), targets, reduction="sum").backward()
    return logits.detach(), gradients_of(theirs)


def ours_of(config: Qwen3MoeConfig, theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return map_tensors(FORMAT.importer(config, config), theirs)


# --- the same numbers ------------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("variant", CONFIGS)
def test_language_models_agree_in_logits_and_every_gradient(variant: str, tmp_path: Path, transformers: Any) -> None:
    config = CONFIGS[variant]
    ours = random_model(config)
    export_to(tmp_path, config, ours)
    theirs = loaded(transformers.AutoModelForCausalLM, tmp_path)
    assert type(theirs).__name__ == "Qwen3MoeForCausalLM"
    tokens = some_tokens(config)
    logits, gradients = train_theirs_on(theirs, tokens)
    assert_close_values(ours(tokens=tokens)["logits"], logits, within=Tolerance(1e-5, 1e-5, 0, 0))
    found = train_on(ours, tokens)
    assert found.keys() == dict(ours.named_parameters()).keys()
    within = Tolerance(rtol=0, atol=0, angle=1e-8, norm=1e-4)
    assert_close_gradients(found, ours_of(config, gradients), within=within)


def test_in_bfloat16_ours_is_as_near_to_the_exact_numbers_as_theirs(tmp_path: Path, transformers: Any) -> None:
    """With all experts chosen: their router rounds its logits, so near ties among some are decided otherwise."""
    config = CONFIGS["all_experts"]
    ours = random_model(config, torch.bfloat16)
    export_to(tmp_path, config, ours, "bfloat16")
    theirs = loaded(transformers.AutoModelForCausalLM, tmp_path, torch.bfloat16)
    tokens, exact = some_tokens(config), random_model(config, torch.bfloat16).float()
    logits, gradients = train_theirs_on(theirs, tokens)
    found, reference, truth = train_on(ours, tokens), ours_of(config, gradients), train_on(exact, tokens)
    with torch.no_grad():
        found["logits"], reference["logits"] = ours(tokens=tokens)["logits"], logits
        truth["logits"] = exact(tokens=tokens)["logits"]
    limit = TOLERANCES[torch.bfloat16]
    assert found.keys() == reference.keys() == truth.keys()
    for name, value in truth.items():
        (angle, norm), (angle_there, norm_there) = (compare_directions(g[name], value) for g in (found, reference))
        assert angle <= max(limit.angle, 2 * angle_there), f"{name}: 1-cos {angle:.1e}, theirs {angle_there:.1e}"
        assert norm <= max(limit.norm, 2 * norm_there), f"{name}: norm off by {norm:.1e}, theirs {norm_there:.1e}"


def test_in_bfloat16_most_tokens_have_their_logits(tmp_path: Path, transformers: Any) -> None:
    """All but those with a near tie somewhere on their way."""
    config = tiny()
    ours = random_model(config, torch.bfloat16)
    export_to(tmp_path, config, ours, "bfloat16")
    theirs, tokens = loaded(transformers.AutoModelForCausalLM, tmp_path, torch.bfloat16), some_tokens(config)
    with torch.no_grad():
        found, expected = ours(tokens=tokens)["logits"].float(), theirs(tokens).logits.float()
    alike = nn.functional.cosine_similarity(found, expected, dim=-1) > 1 - TOLERANCES[torch.bfloat16].angle
    assert alike.float().mean() > 0.8


def test_classifiers_and_bare_backbones_agree(tmp_path: Path, transformers: Any) -> None:
    config = changed(heads={"topic": ClassificationHeadConfig(num_classes=3)})
    ours, tokens = random_model(config), some_tokens(config)
    export_to(tmp_path / "classifier", config, ours)
    theirs = loaded(transformers.AutoModelForSequenceClassification, tmp_path / "classifier")
    theirs.config.pad_token_id = -1  # none of these tokens is padding
    torch.testing.assert_close(ours(tokens=tokens)["class_logits"], theirs(tokens).logits, rtol=1e-5, atol=1e-5)

    config = changed(heads={"vector": EmbeddingHeadConfig(normalize=False)})
    ours = random_model(config)
    export_to(tmp_path / "backbone", config, ours)
    theirs = loaded(transformers.AutoModel, tmp_path / "backbone")
    expected = theirs(tokens).last_hidden_state[:, -1]
    torch.testing.assert_close(ours(tokens=tokens)["embedding"], expected, rtol=1e-5, atol=1e-5)


# --- files in both layouts -------------------------------------------------------------------------------------------


def test_both_layouts_of_experts_load_to_identical_logits(tmp_path: Path, transformers: Any) -> None:
    tokens, logits = some_tokens(tiny()), []
    for layout, name in (("per_expert", "experts.7.up_proj.weight"), ("fused", "experts.gate_up_proj")):
        config = changed(expert_files=layout)
        export_to(tmp_path / layout, config, random_model(config))
        assert f"model.layers.1.mlp.{name}" in names_in(tmp_path / layout)
        assert config_of(tmp_path / layout) == config
        theirs = loaded(transformers.AutoModelForCausalLM, tmp_path / layout)
        # In memory of its own: tensors of a mapped file are aligned by chance, and products round accordingly.
        logits.append(copy.deepcopy(theirs)(tokens).logits)
    assert torch.equal(*logits)


@pytest.mark.parametrize("layout", ["per_expert", "fused"])
def test_either_layout_is_read_whatever_is_to_be_written(layout: str, tmp_path: Path) -> None:
    model = random_model(tiny())
    export_to(tmp_path, changed(expert_files=layout), model)
    for wanted in ("per_expert", "fused"):
        again, graph = into_model(tmp_path, changed(expert_files=wanted))
        assert not graph.fresh
        assert all(torch.equal(tensor, state_of(model)[name]) for name, tensor in state_of(again).items())


def published(transformers: Any, directory: Path, **fields: Any) -> Any:
    """A model that transformers wrote."""
    torch.manual_seed(3)
    config = transformers.Qwen3MoeConfig.from_dict(FORMAT.config_json(tiny(), "float32") | fields)
    model = transformers.Qwen3MoeForCausalLM(config)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.2)
    model.save_pretrained(directory)
    return model


@pytest.mark.parametrize(
    ("fields", "changes"),
    [
        ({}, {}),
        ({"norm_topk_prob": False, "tie_word_embeddings": True}, {"renormalise": False, "tie_embeddings": True}),
        (
            {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [1]},
            {"num_layers": 4, "dense_layers": [0, 1, 2]},
        ),
        ({"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}, {"sliding_window": 4}),
    ],
)
def test_files_of_transformers_are_read(
    fields: dict[str, Any], changes: dict[str, Any], tmp_path: Path, transformers: Any
) -> None:
    theirs = published(transformers, tmp_path, **fields)
    assert any(name.endswith("mlp.experts.7.up_proj.weight") for name in names_in(tmp_path))
    config = config_of(tmp_path)
    assert config == changed(**changes)
    ours, graph = into_model(tmp_path, config)
    tokens = some_tokens(config)
    torch.testing.assert_close(ours(tokens=tokens)["logits"], theirs(tokens).logits, rtol=1e-5, atol=1e-5)
    assert not graph.fresh


def test_a_job_takes_its_sizes_from_published_weights(tmp_path: Path, transformers: Any) -> None:
    published(transformers, tmp_path, norm_topk_prob=False)
    fields = {"name": "qwen3_moe", "pretrained": str(tmp_path), "balancing": [{"name": "z_loss"}]}
    values = {"model": fields, "task": "causal_lm", "data": "toy_tokens", "optimizer": "toy_optimizer", "steps": 1}
    names = ("d9d_moe.plugin", "d9d_nn.plugin", "d9d_testing.toy.plugin", "d9d_qwen3.plugin")
    job = JobFile.from_values(values, registry=Registry.of(*map(importlib.import_module, names)))
    assert job.model == changed(renormalise=False, pretrained=str(tmp_path), balancing=[{"name": "z_loss"}])


@pytest.mark.thorough
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_what_is_exported_is_read_back(config: Qwen3MoeConfig, tmp_path: Path) -> None:
    model = random_model(config)
    export_to(tmp_path, config, model)
    assert config_of(tmp_path) == config
    again, graph = into_model(tmp_path, config)
    assert not graph.fresh
    assert all(torch.equal(tensor, state_of(model)[name]) for name, tensor in state_of(again).items())


def test_a_bias_of_the_selection_is_kept_and_transformers_says_that_it_is_left_out(
    tmp_path: Path, transformers: Any
) -> None:
    config = changed(**BIASED)
    model = random_model(config)
    export_to(tmp_path, config, model)
    theirs = {f"model.layers.{layer}.mlp.gate.selection_bias" for layer in range(2)}
    assert theirs < names_in(tmp_path)
    loaded(transformers.AutoModelForCausalLM, tmp_path, unexpected=theirs)
    assert config_of(tmp_path) == config
    again, graph = into_model(tmp_path, config)
    assert not graph.fresh
    assert all(torch.equal(tensor, state_of(model)[name]) for name, tensor in state_of(again).items())


def test_a_bias_of_the_selection_starts_anew_where_there_was_none_and_is_not_lost_silently(tmp_path: Path) -> None:
    export_to(tmp_path / "without", tiny(), random_model(tiny()))
    export_to(tmp_path / "with", changed(**BIASED), random_model(changed(**BIASED)))
    assert into_model(tmp_path / "without", changed(**BIASED))[1].fresh == {
        f"layers.{layer}.ffn.router.selection_bias" for layer in range(2)
    }
    with pytest.raises(CheckpointError, match=r"selection_bias.* add \{name: bias_update\} to model.balancing"):
        into_model(tmp_path / "with", tiny())


class Counting:
    """A directory that counts the numbers that are read."""

    def __init__(self, directory: ModelDirectory) -> None:
        self.directory = directory
        self.numbers = 0

    def read(self, name: str, offset: Sequence[int], into: Tensor) -> None:
        self.numbers += into.numel()
        self.directory.read(name, offset, into)


@pytest.mark.parametrize("layout", ["per_expert", "fused"])
@pytest.mark.parametrize("part", [(slice(4, 6),), (slice(None), slice(5, 16))], ids=["experts", "features"])
def test_a_rank_reads_what_it_holds_of_the_experts_and_no_more(
    layout: str, part: tuple[slice, ...], tmp_path: Path
) -> None:
    config = changed(expert_files=layout)
    state = state_of(random_model(config))
    export_to(tmp_path, config, random_model(config))
    with ModelDirectory.open(tmp_path) as opened:
        graph = StateGraph(FORMAT.importer(config, config), opened.specs)
        for name in (f"layers.1.ffn.experts.{matrix}" for matrix in ("gate_proj", "up_proj", "down_proj")):
            source, into = Counting(opened), torch.empty_like(state[name][part])
            graph.outputs[name].read(source, [*(bounds.start or 0 for bounds in part), 0, 0][:3], into)
            assert torch.equal(into, state[name][part])
            assert source.numbers == into.numel()


# --- refusals ------------------------------------------------------------------------------------------------------


def exported(config: Qwen3MoeConfig) -> dict[str, TensorSpec]:
    return StateGraph(FORMAT.exporter(config), specs_of(state_of(random_model(config)))).specs


def without(name: str) -> Callable[[dict[str, TensorSpec]], dict[str, TensorSpec]]:
    return lambda specs: {other: spec for other, spec in specs.items() if other != name}


@pytest.mark.parametrize(
    ("layout", "change", "text"),
    [
        ("per_expert", without("model.layers.1.mlp.experts.3.up_proj.weight"), "up_proj.weight', which does not exist"),
        ("fused", without("model.layers.0.mlp.experts.down_proj"), "experts.down_proj', which does not exist"),
        ("fused", lambda specs: exported(tiny()) | specs, "no mapper takes 'model.layers.0.mlp.experts"),
    ],
)  # fmt: skip
def test_incomplete_experts_and_experts_in_two_layouts_are_refused(
    layout: str, change: Callable[[dict[str, TensorSpec]], dict[str, TensorSpec]], text: str
) -> None:
    specs = change(exported(changed(expert_files=layout)))
    with pytest.raises(CheckpointError, match=text):
        StateGraph(FORMAT.importer(tiny(), tiny()), specs)


def test_fewer_experts_than_stored_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"no mapper takes 'model\.layers\.0\.mlp\.experts\.6"):
        StateGraph(FORMAT.importer(changed(num_experts=6), tiny()), exported(tiny()))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model_type": "qwen3"}, "model_type is 'qwen3', not 'qwen3_moe'"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "architecture Qwen3ForCausalLM is not one of qwen3_moe"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1; .* set it to 0"),
        ({"quantization_config": {"quant_method": "fp8"}}, "weights are quantized"),
        ({"num_experts": 16}, "num_local_experts is 8 and num_experts is 16; .* remove the wrong field"),
        ({"num_experts": 0, "num_local_experts": 0}, "values are invalid for a qwen3_moe model: num_experts"),
        ({"num_experts_per_tok": 9}, "experts_per_token: .*9 is more than num_experts = 8"),
        ({"mlp_only_layers": [0, 1]}, "dense_layers: .*all 2 layers are dense.* use the model qwen3"),
        ({"decoder_sparse_step": 3}, "dense_layers: .*all 2 layers are dense"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ({"mlp_only_layers": 5}, "a wrong type for a qwen3_moe model"),
        ({"use_sliding_window": True, "sliding_window": 4}, "max_window_layers is 2 and the window is 4; releases"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has .* are full_attention"),
    ],
)
def test_configs_we_do_not_compute_are_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        FORMAT.config_from_json({**FORMAT.config_json(tiny(), "float32"), **changes})


@pytest.mark.parametrize("name", ["moe_intermediate_size", "num_experts_per_tok", "num_hidden_layers"])
def test_incomplete_config_json_says_what_is_missing(name: str) -> None:
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        FORMAT.config_from_json({k: v for k, v in FORMAT.config_json(tiny(), "float32").items() if k != name})


def test_config_json_survives_transformers(tmp_path: Path, transformers: Any) -> None:
    """transformers writes the config that it read, in its own form."""
    trained = changed(**BIASED, capacity=1.5, expert_files="fused")
    balanced = changed(balancing=(AuxiliaryLossConfig(coefficient=0.01),))
    for variant, config in (CONFIGS | {"trained": trained, "balanced": balanced}).items():
        theirs = transformers.Qwen3MoeConfig.from_dict(FORMAT.config_json(config, "bfloat16"))
        theirs.save_pretrained(tmp_path)
        data = json.loads((tmp_path / "config.json").read_text())
        data.setdefault("architectures", ["Qwen3MoeForCausalLM"])
        assert "num_experts" not in data
        assert FORMAT.config_from_json(data) == config, variant


@pytest.mark.parametrize("variant", ["tiny", "not_renormalised", "yarn", "30b-a3b"])
def test_config_json_of_transformers_4_is_read(variant: str) -> None:
    data = FORMAT.config_json(CONFIGS[variant], "float32")
    del data["rope_parameters"], data["num_local_experts"]
    if data["rope_scaling"] is not None:
        data["rope_scaling"]["type"] = data["rope_scaling"].pop("rope_type")
    assert FORMAT.config_from_json(data) == CONFIGS[variant]


def test_what_config_json_leaves_out_is_what_transformers_takes() -> None:
    data = FORMAT.config_json(changed(renormalise=False), "float32")
    for name in ("norm_topk_prob", "mlp_only_layers", "decoder_sparse_step", "use_sliding_window", "sliding_window"):
        del data[name]
    del data["head_dim"]
    assert FORMAT.config_from_json(data) == changed(renormalise=False)
