"""Files of stand-in conversions become the tensors of a small model, and go back bit for bit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from d9d_core.errors import CheckpointError
from d9d_transformers import conversion
from d9d_transformers.attention import register
from d9d_transformers.config import TransformersConfig, example
from d9d_transformers.conversion import adapter_names, exporter, importer
from d9d_transformers.library import native_config, native_model
from d9d_weights.graph.graph import StateGraph, map_tensors, specs_of
from torch import Tensor


class MergeModulelist:
    """Operation that stacks tensors of a list of modules."""

    def __init__(self, dim: int = 0) -> None:
        self.dim = dim


class Concatenate(MergeModulelist):
    """Operation that concatenates tensors."""


class Flip(MergeModulelist):
    """Operation that d9d does not have."""


def renamed(source: str, target: str) -> Any:
    return SimpleNamespace(source_patterns=[source], target_patterns=[target])


def made(sources: list[str], targets: list[str], *operations: Any) -> Any:
    return SimpleNamespace(source_patterns=sources, target_patterns=targets, operations=list(operations))


def shorter(prefix: str, inside: str | None) -> Any:
    return SimpleNamespace(prefix_to_remove=prefix, model_prefix=inside)


def small(kind: str, **fields: Any) -> TransformersConfig:
    return TransformersConfig(config={**example(kind).config, "num_hidden_layers": 1, **fields})


def memory_of(config: TransformersConfig) -> dict[str, Tensor]:
    """Tensors of a model of transformers, all elements different."""
    register()
    with torch.device("meta"):
        state = native_model(native_config(config.config)).state_dict()
    return {
        name: torch.arange(tensor.numel()).view(tensor.shape).float() + 1e4 * index
        for index, (name, tensor) in enumerate(state.items())
    }


def conversions(monkeypatch: pytest.MonkeyPatch, *transforms: Any) -> None:
    monkeypatch.setattr(conversion, "conversions", lambda _: list(transforms))


def passed(config: TransformersConfig, files: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of d9d's model from files; the export has the same files."""
    found = map_tensors(importer(config, config), files)
    exported = map_tensors(exporter(config), dict(found))
    assert exported.keys() == files.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in files.items())
    return dict(found)


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_renamed_tensors_have_the_names_of_all_renamings_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    # From files to memory: heads -> mixer -> self_attn, and ^blocks -> model.layers.
    conversions(
        monkeypatch, renamed("heads", "mixer"), renamed("mixer", "self_attn"),
        renamed("^blocks", "model.layers"), renamed(r"\.end\.weight$", ".norm.weight"),
    )  # fmt: skip
    config = small("llama")
    memory = memory_of(config)
    files = {
        name.replace("self_attn", "heads").replace("model.layers", "blocks").replace(".norm.weight", ".end.weight"): one
        for name, one in memory.items()
    }
    assert "blocks.0.heads.q_proj.weight" in files
    assert_equal(passed(config, files), memory)


@pytest.mark.parametrize("dim", [0, 1])
def test_a_concatenated_tensor_is_made_of_its_parts_in_order(monkeypatch: pytest.MonkeyPatch, dim: int) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    conversions(monkeypatch, made(["one", "other"], ["down_proj"], Concatenate(dim)), renamed("feed", "mlp"))
    config = small("llama")
    memory = memory_of(config)
    files = {path.replace("mlp", "feed"): tensor for path, tensor in memory.items() if path != name}
    halves = memory[name].chunk(2, dim=dim)
    files |= {f"model.layers.0.feed.{part}.weight": half for part, half in zip(("one", "other"), halves, strict=True)}
    assert_equal(passed(config, files), memory)


def banks(memory: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of d9d's model: experts are three banks."""
    experts = "model.layers.0.mlp.experts"
    found = dict(memory)
    gate, up = found.pop(f"{experts}.gate_up_proj").chunk(2, dim=1)
    down = found.pop(f"{experts}.down_proj")
    parts = {"gate_proj": gate, "up_proj": up, "down_proj": down}
    return found | {f"{experts}.bank.{name}": tensor.mT for name, tensor in parts.items()}


def test_stacked_and_concatenated_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    conversions(
        monkeypatch,
        made(["mlp.experts.*.w1", "mlp.experts.*.w3"], ["mlp.experts.gate_up_proj"], MergeModulelist(), Concatenate(1)),
        made(["mlp.experts.*.w2"], ["mlp.experts.down_proj"], MergeModulelist()),
    )
    config = small("qwen3_moe")
    memory = memory_of(config)
    files = {name: tensor for name, tensor in memory.items() if "experts" not in name}
    experts = "model.layers.0.mlp.experts"
    gate_up, down = memory[f"{experts}.gate_up_proj"], memory[f"{experts}.down_proj"]
    for expert in range(4):
        gate, up = gate_up[expert].chunk(2)
        files |= {f"{experts}.{expert}.w1": gate, f"{experts}.{expert}.w3": up, f"{experts}.{expert}.w2": down[expert]}
    assert_equal(passed(config, files), banks(memory))


def test_experts_without_conversions_become_banks(monkeypatch: pytest.MonkeyPatch) -> None:
    conversions(monkeypatch)
    config = small("qwen3_moe")
    memory = memory_of(config)
    assert_equal(passed(config, memory), banks(memory))


@pytest.mark.parametrize(
    ("transform", "text"),
    [
        (made(["one"], ["down_proj"], Flip()), "makes model.layers.0.mlp.down_proj.weight of files by Flip, which d9d"),
        (made(["one.*"], ["down_proj"], MergeModulelist(1)), "of files by MergeModulelist, which d9d does not support"),
        (made(["a", "b"], ["down_proj"], Concatenate(0), MergeModulelist(0)), "by Concatenate, MergeModulelist, which"),
        (made(["a"], ["up_proj", "down_proj"], Flip(), Concatenate()), "by Flip, Concatenate, which d9d does not"),
        (renamed("mlp|feed", "up_proj"), "renames tensors by the pattern 'mlp|feed', which d9d does not support"),
        (renamed("mlp", "up_(proj)"), r"renames tensors by the pattern 'up_\(proj\)', which"),
        (renamed("[ab]", "up_proj"), "renames tensors by the pattern"),
    ],
)
def test_conversions_that_d9d_does_not_have_are_refused(
    monkeypatch: pytest.MonkeyPatch, transform: Any, text: str
) -> None:
    conversions(monkeypatch, transform)
    with pytest.raises(CheckpointError, match=text.replace("|", r"\|")):
        exporter(small("llama"))


def test_conversions_of_tensors_that_the_model_lacks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    conversions(monkeypatch, made(["a"], ["vision.one", "vision.other"], Flip()), made(["a"], ["vision"], Flip()))
    config = small("llama")
    memory = memory_of(config)
    assert_equal(passed(config, memory), memory)


@pytest.mark.parametrize("inside", [None, "model"])
def test_files_of_a_larger_model_may_have_a_longer_prefix(monkeypatch: pytest.MonkeyPatch, inside: str | None) -> None:
    conversions(monkeypatch, shorter("text", inside))
    config = small("llama")
    memory = memory_of(config)
    before, after = ("", "text.") if inside is None else ("model.", "model.text.")
    files = {
        after + name.removeprefix(before) if name.startswith(before) else name: one for name, one in memory.items()
    }
    assert_equal(dict(map_tensors(importer(config, config), files)), memory)
    assert_equal(dict(map_tensors(importer(config, config), memory)), memory)
    assert map_tensors(exporter(config), memory).keys() == memory.keys()


def test_a_tied_head_in_files_has_to_equal_the_embedding() -> None:
    config = small("llama", tie_word_embeddings=True)
    memory = memory_of(config)
    del memory["lm_head.weight"]
    table = memory["model.embed_tokens.weight"]
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}  # of old releases
    for files in (memory, memory | {"lm_head.weight": table.clone()}, memory | old):
        assert_equal(dict(map_tensors(importer(config, config), files)), memory)
    assert "lm_head.weight" not in map_tensors(exporter(config), memory)
    (duplicate,) = StateGraph(importer(config, config), specs_of(files | {"lm_head.weight": table})).duplicates
    assert duplicate.name == "lm_head.weight"
    text = "'lm_head.weight' in the files differs from 'model.embed_tokens.weight', but config.json ties them"
    assert duplicate.otherwise == text


def test_a_tied_head_is_renamed_with_its_embedding(monkeypatch: pytest.MonkeyPatch) -> None:
    conversions(monkeypatch, renamed("table", "embed_tokens"), renamed("output", "lm_head"))
    config = small("llama", tie_word_embeddings=True)
    memory = {name: one for name, one in memory_of(config).items() if name != "lm_head.weight"}
    files = {name.replace("embed_tokens", "table"): one for name, one in memory.items()}
    assert_equal(passed(config, files), memory)


@pytest.mark.parametrize("outer", ["language_model.model", "model.language_model", "model.text_model"])
def test_names_inside_the_files_of_a_larger_model(outer: str) -> None:
    config = small("llama")
    memory = memory_of(config)
    files = {name.replace("model.", f"{outer}.", 1): tensor for name, tensor in memory.items()}
    files["language_model.lm_head.weight"] = files.pop("lm_head.weight")
    files["vision.weight"] = torch.ones(1)
    stored = TransformersConfig(config=config.config, container="llava")
    assert_equal(dict(map_tensors(importer(config, stored), files)), memory)


def test_adapters_of_a_language_model_inside_a_larger_one_have_its_names() -> None:
    inner = example("gemma3_text").config
    for container, prefix in ((None, "model."), ("gemma3", "model.language_model.")):
        config = TransformersConfig(config=inner, container=container)
        memory = {name: one for name, one in memory_of(config).items() if name != "lm_head.weight"}
        named = map_tensors(adapter_names(config), memory)
        assert set(named) == {name.replace("model.", prefix, 1) for name in memory}
