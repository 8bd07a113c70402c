"""Exports have the layout that vLLM's loader of Qwen3 and Qwen3-MoE expects, name by name.

The tables were written from the loader's source (``vllm/model_executor/models/qwen3.py`` and ``qwen3_moe.py``, and the
``config`` fields that these read). vLLM itself is not installed here: this is no run of it.

Sizes: V words, H features, Q and K features of all query and key heads, D of one head, I features inside a
feed-forward, F inside an expert, E experts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from d9d_moe.balancing.config import BiasUpdateConfig
from d9d_qwen3 import config as dense
from d9d_qwen3 import moe_config as moe
from d9d_qwen3.hugging_face.dense import Qwen3HuggingFace
from d9d_qwen3.hugging_face.moe import Qwen3MoeHuggingFace
from d9d_qwen3.model import Qwen3
from d9d_weights.graph.graph import StateGraph, specs_of
from d9d_weights.hugging_face.directory import ModelDirectory
from d9d_weights.hugging_face.export import ModelFiles, export_model
from d9d_weights.hugging_face.writer import ModelWriter
from d9d_weights.sharding.model_tensors import model_tensors

#: Tensors of a checkpoint -> shape, for each group of them. To the right: the parameter that vLLM makes of several.
ONCE = {"model.embed_tokens.weight": "V H", "model.norm.weight": "H"}
UNTIED = {"lm_head.weight": "V H"}  # with tie_word_embeddings the loader skips it, or shares the embedding's
LAYER = {
    "input_layernorm.weight": "H",
    "self_attn.q_proj.weight": "Q H",  # qkv_proj
    "self_attn.k_proj.weight": "K H",  # qkv_proj
    "self_attn.v_proj.weight": "K H",  # qkv_proj
    "self_attn.q_norm.weight": "D",
    "self_attn.k_norm.weight": "D",
    "self_attn.o_proj.weight": "H Q",
    "post_attention_layernorm.weight": "H",
}
BIASED = {
    "self_attn.q_proj.bias": "Q",  # qkv_proj
    "self_attn.k_proj.bias": "K",  # qkv_proj
    "self_attn.v_proj.bias": "K",  # qkv_proj
}
FEED_FORWARD = {
    "mlp.gate_proj.weight": "I H",  # gate_up_proj
    "mlp.up_proj.weight": "I H",  # gate_up_proj
    "mlp.down_proj.weight": "H I",
}
ROUTER = {"mlp.gate.weight": "E H"}
EXPERT = {
    "mlp.experts.{}.gate_proj.weight": "F H",  # experts.w13_weight
    "mlp.experts.{}.up_proj.weight": "F H",  # experts.w13_weight
    "mlp.experts.{}.down_proj.weight": "H F",  # experts.w2_weight
}

#: Fields of ``config.json`` that the loader reads, through transformers' config object.
FIELDS = {
    "architectures": list,
    "attention_bias": bool,
    "dtype": str,
    "head_dim": int,
    "hidden_act": str,
    "hidden_size": int,
    "intermediate_size": int,
    "max_position_embeddings": int,
    "num_attention_heads": int,
    "num_hidden_layers": int,
    "num_key_value_heads": int,
    "rms_norm_eps": float,
    "rope_parameters": dict,
    "tie_word_embeddings": bool,
    "vocab_size": int,
}
FIELDS_OF_EXPERTS = {
    "decoder_sparse_step": int,
    "mlp_only_layers": list,
    "moe_intermediate_size": int,
    "norm_topk_prob": bool,
    "num_experts": int,
    "num_experts_per_tok": int,
}
#: Further ones that releases before transformers 5 read, in place of ``rope_parameters`` and ``dtype``.
EARLIER = {"rope_theta": float, "torch_dtype": str}


@dataclass(frozen=True)
class Case:
    """A model, and the class that vLLM serves it with."""

    form: Any
    config: Any
    architecture: str

    def changed(self, **fields: Any) -> Case:
        return Case(self.form, type(self.config).model_validate(self.config.model_dump() | fields), self.architecture)


DENSE = Case(Qwen3HuggingFace(), dense.tiny(), "Qwen3ForCausalLM")
EXPERTS = Case(Qwen3MoeHuggingFace(), moe.tiny(), "Qwen3MoeForCausalLM")
CASES = {
    "dense": DENSE,
    "dense, tied": DENSE.changed(tie_embeddings=True),
    "dense, wide heads": DENSE.changed(head_dim=24, num_key_value_heads=1),
    "experts": EXPERTS,
    "experts, tied": EXPERTS.changed(tie_embeddings=True),
    "experts, some layers dense": EXPERTS.changed(num_layers=4, dense_layers=[0, 2], intermediate_size=40),
}
cases = pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def expected_tensors(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes that the loader expects of a model with this ``config.json``."""
    sizes = {
        "V": config["vocab_size"],
        "H": config["hidden_size"],
        "Q": config["num_attention_heads"] * config["head_dim"],
        "K": config["num_key_value_heads"] * config["head_dim"],
        "D": config["head_dim"],
        "I": config["intermediate_size"],
        "F": config.get("moe_intermediate_size"),
        "E": config.get("num_experts"),
    }
    names = {**ONCE, **({} if config["tie_word_embeddings"] else UNTIED)}
    for number in range(config["num_hidden_layers"]):
        layer = {**LAYER, **(BIASED if config["attention_bias"] else {})}
        experts = config.get("num_experts", 0)
        has_experts = experts and number not in config["mlp_only_layers"]
        if has_experts and (number + 1) % config["decoder_sparse_step"] == 0:
            layer |= ROUTER
            layer |= {name.format(expert): shape for expert in range(experts) for name, shape in EXPERT.items()}
        else:
            layer |= FEED_FORWARD
        names |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    return {name: tuple(sizes[size] for size in shape.split()) for name, shape in names.items()}


@pytest.fixture
def exported(tmp_path: Path) -> Callable[..., tuple[dict[str, Any], ModelDirectory]]:
    """Export a model as a job does; returns its ``config.json`` and its opened directory."""

    def export(case: Case, dtype: torch.dtype = torch.float32, **limits: int) -> tuple[dict[str, Any], ModelDirectory]:
        tensors = model_tensors(Qwen3(case.config).to(dtype))
        graph = StateGraph(case.form.exporter(case.config), specs_of(tensors))
        files = ModelFiles(case.form.config_json(case.config, str(dtype).removeprefix("torch.")))
        export_model(ModelWriter(tmp_path, graph.specs, **limits), graph, tensors, files)
        with ModelDirectory.open(tmp_path) as directory:
            return json.loads((tmp_path / "config.json").read_text()), directory

    return export


@cases
@dtypes
def test_tensors_have_the_names_shapes_and_format_that_vllm_expects(
    case: Case, dtype: torch.dtype, exported: Callable[..., tuple[dict[str, Any], ModelDirectory]]
) -> None:
    config, directory = exported(case, dtype)
    assert {name: spec.shape for name, spec in directory.specs.items()} == expected_tensors(config)
    assert {spec.dtype for spec in directory.specs.values()} == {dtype}


@pytest.mark.thorough
@cases
def test_config_json_has_the_fields_that_vllm_reads(
    case: Case, tmp_path: Path, exported: Callable[..., tuple[dict[str, Any], ModelDirectory]]
) -> None:
    transformers = pytest.importorskip("transformers")
    config, _ = exported(case, torch.bfloat16)
    fields = FIELDS | (FIELDS_OF_EXPERTS if case.form is EXPERTS.form else {})
    assert {name: type(config.get(name)) for name in fields | EARLIER} == fields | EARLIER
    assert (config["architectures"], config["dtype"], config["torch_dtype"]) == (
        [case.architecture], "bfloat16", "bfloat16",
    )  # fmt: skip
    read = transformers.AutoConfig.from_pretrained(tmp_path)
    for name in fields.keys() - {"dtype", "rope_parameters"}:
        assert getattr(read, name) == config[name], name
    assert read.dtype == torch.bfloat16
    assert read.rope_parameters["rope_theta"] == config["rope_parameters"]["rope_theta"] == config["rope_theta"]


@pytest.mark.parametrize("case", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_several_files_have_an_index_that_names_each_tensor_once(
    case: Case, tmp_path: Path, exported: Callable[..., tuple[dict[str, Any], ModelDirectory]]
) -> None:
    config, _ = exported(case, shard_bytes=10_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == expected_tensors(config).keys()
    assert set(index["weight_map"].values()) == {file.name for file in tmp_path.glob("*.safetensors")}
    assert len(set(index["weight_map"].values())) > 1


@pytest.mark.parametrize(
    ("case", "unknown"),
    [
        (DENSE.changed(attention_bias=True), "self_attn.o_proj.bias"),
        (EXPERTS.changed(balancing=[BiasUpdateConfig()]), "mlp.gate.selection_bias"),
    ],
    ids=["attention_bias", "selection_bias"],
)
def test_what_vllm_leaves_out_is_known(
    case: Case, unknown: str, exported: Callable[..., tuple[dict[str, Any], ModelDirectory]]
) -> None:
    """Biases without a parameter in vLLM are skipped by its loader, and change its outputs; the README says so."""
    config, directory = exported(case)
    left = directory.specs.keys() - expected_tensors(config).keys()
    assert left == {f"model.layers.{number}.{unknown}" for number in range(config["num_hidden_layers"])}
    assert expected_tensors(config).keys() <= directory.specs.keys()
