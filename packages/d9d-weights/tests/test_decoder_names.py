"""Names of decoders' tensors in files of transformers: heads, ties, added tokens and biases."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from d9d_core.errors import CheckpointError
from d9d_core.types import TensorSpec
from d9d_weights.graph.base import Parallel
from d9d_weights.graph.graph import StateGraph
from d9d_weights.graph.merging import Chunk
from d9d_weights.hugging_face.names import exporter, importer, layer_names

LAYERS = list(layer_names({"mlp.up_proj": "ffn.up_proj"}))
LAYER = "model.layers.0.mlp.up_proj.weight"


def head(kind: str, num_classes: int | None = None, **more: Any) -> Any:
    return SimpleNamespace(kind=kind, **({} if num_classes is None else {"num_classes": num_classes}), **more)


LM = {"lm": head("causal_lm")}


def model(heads: Any = LM, *, tied: bool = False, added: int = 0, words: int = 10) -> Any:
    return SimpleNamespace(heads=heads, tie_embeddings=tied, added_tokens=added, vocab_size=words)


def specs(*names: str, words: int = 10) -> dict[str, TensorSpec]:
    return {name: TensorSpec((words, 4), torch.float32) for name in names}


def loaded(config: Any, stored: Any, *files: str, bare: bool = False) -> dict[str, str]:
    """Formula of each tensor of the model, and ``fresh``, from files with these further tensors."""
    names = ["model.embed_tokens.weight", "model.norm.weight", LAYER, *files]
    if bare:
        names = [name.removeprefix("model.") for name in names]
    graph = StateGraph(importer(config, stored, LAYERS), specs(*names))
    found = {name: value.text() for name, value in graph.outputs.items()} | dict.fromkeys(graph.fresh, "fresh")
    body = "" if bare else "model."
    assert found.pop("norm.weight") == f"{body}norm.weight"
    assert found.pop("layers.0.ffn.up_proj.weight") == LAYER.removeprefix("" if body else "model.")
    return found


EMBED = "model.embed_tokens.weight"


def test_a_language_model_has_an_embedding_and_a_head() -> None:
    assert loaded(model(), model(), "lm_head.weight") == {
        "embedding.weight": EMBED,
        "heads.lm.weight": "lm_head.weight",
    }
    other = model({"other": head("causal_lm")})
    assert loaded(other, model(), "lm_head.weight")["heads.other.weight"] == "lm_head.weight"
    rotary = "model.layers.3.self_attn.rotary_emb.inv_freq"
    assert "heads.lm.weight" in loaded(model(), model(), "lm_head.weight", rotary)


def test_files_without_the_prefix_of_the_model_are_read_too() -> None:
    backbone = model({"e": head("embedding")})
    assert loaded(backbone, backbone, bare=True) == {"embedding.weight": "embed_tokens.weight"}


def test_a_missing_head_says_what_to_do() -> None:
    with pytest.raises(CheckpointError, match="the files have no 'lm_head.weight'; if the head is the embedding, set"):
        loaded(model(), model())


def test_a_tied_head_is_the_embedding() -> None:
    tied = model(tied=True)
    assert loaded(tied, tied) == {"embedding.weight": EMBED}
    assert loaded(model(), tied) == {"embedding.weight": EMBED, "heads.lm.weight": EMBED}
    assert loaded(model(), tied, "lm_head.weight")["heads.lm.weight"] == "lm_head.weight"
    classifier = model({"c": head("classification", 3)})
    assert loaded(classifier, tied) == {"embedding.weight": EMBED, "heads.c.weight": "fresh"}


@pytest.mark.parametrize(
    ("heads", "stored", "files", "found"),
    [
        # The head of the same name and kind, else the only one of its kind, else a fresh one.
        ({"c": head("classification", 3)}, LM, ["lm_head.weight"], {"heads.c.weight": "fresh"}),
        (
            {"c": head("classification", 3)},
            {"c": head("classification", 3)},
            ["score.weight"],
            {"heads.c.weight": "score.weight"},
        ),
        (
            {"c": head("classification", 3)},
            {"d": head("classification", 3)},
            ["score.weight"],
            {"heads.c.weight": "score.weight"},
        ),
        (
            {"c": head("classification", 3)},
            {"c": head("classification", 4)},
            ["score.weight"],
            {"heads.c.weight": "fresh"},
        ),
        (
            {"c": head("classification", 3)},
            {"d": head("classification", 3), "e": head("classification", 3)},
            ["score.weight", "heads.e.weight"],
            {"heads.c.weight": "fresh"},
        ),
        (
            {"t": head("token_classification", 3)},
            {"t": head("token_classification", 3)},
            ["score.weight", "score.bias"],
            {"heads.t.weight": "score.weight", "heads.t.bias": "score.bias"},
        ),
        (
            {"t": head("token_classification", 3)},
            LM,
            ["lm_head.weight"],
            {"heads.t.weight": "fresh", "heads.t.bias": "fresh"},
        ),
        # A head that no class of transformers has is stored under our name.
        (
            {"lm": head("causal_lm"), "c": head("classification", 3)},
            {"lm": head("causal_lm"), "c": head("classification", 3)},
            ["lm_head.weight", "heads.c.weight"],
            {"heads.lm.weight": "lm_head.weight", "heads.c.weight": "heads.c.weight"},
        ),
        ({"e": head("embedding")}, LM, ["lm_head.weight"], {}),
        # An embedding head has a tensor only with a projection.
        (
            {"e": head("embedding", projection=5)},
            {"a": head("embedding"), "b": head("embedding", projection=5)},
            ["heads.b.weight"],
            {"heads.e.weight": "heads.b.weight"},
        ),
        ({"e": head("embedding", projection=5)}, {"e": head("embedding")}, [], {"heads.e.weight": "fresh"}),
    ],
)
def test_heads_are_loaded_from_their_stored_counterparts(heads: Any, stored: Any, files: list[str], found: Any) -> None:
    assert loaded(model(heads), model(stored), *files) == {"embedding.weight": EMBED, **found}


def test_added_tokens_are_a_tensor_of_their_own() -> None:
    added = model(added=3)
    assert loaded(added, model(), "lm_head.weight") == {
        "embedding.regular.weight": f"{EMBED}[0:7]",
        "embedding.added.weight": f"{EMBED}[7:10]",
        "heads.lm.regular.weight": "lm_head.weight[0:7]",
        "heads.lm.added.weight": "lm_head.weight[7:10]",
    }
    larger = model(added=3, words=13)
    assert loaded(larger, model(), "lm_head.weight") == {
        "embedding.regular.weight": EMBED,
        "embedding.added.weight": "fresh",
        "heads.lm.regular.weight": "lm_head.weight",
        "heads.lm.added.weight": "fresh",
    }
    fresh = model({"lm": head("causal_lm"), "other": head("causal_lm")}, added=3)
    two = model({"a": head("causal_lm"), "b": head("causal_lm")})
    found = loaded(fresh, two, "lm_head.weight", "heads.b.weight")
    assert {name: text for name, text in found.items() if name.startswith("heads")} == {
        f"heads.{name}.{part}.weight": "fresh" for name in ("lm", "other") for part in ("regular", "added")
    }


def test_files_may_end_with_any_part_of_a_vocabulary() -> None:
    parts = {"images": 2, "tools": 1}
    for words, second, third in (
        (10, "fresh", "fresh"),
        (12, f"{EMBED}[10:12]", "fresh"),
        (13, f"{EMBED}[10:12]", f"{EMBED}[12:13]"),
    ):
        three = SimpleNamespace(heads={}, tie_embeddings=False, added_tokens=parts, vocab_size=13)
        graph = StateGraph(
            importer(three, model({}, words=words), LAYERS),
            specs(EMBED, "model.norm.weight", LAYER, words=words),
        )
        found = {name: value.text() for name, value in graph.outputs.items()} | dict.fromkeys(graph.fresh, "fresh")
        assert found["embedding.regular.weight"] == (EMBED if words == 10 else f"{EMBED}[0:10]")
        assert (found["embedding.images.weight"], found["embedding.tools.weight"]) == (second, third)


def test_a_model_is_written_under_transformers_names() -> None:
    config = model({"lm": head("causal_lm"), "t": head("token_classification", 3)}, added=3)
    ours = {
        "embedding.regular.weight": 7, "embedding.added.weight": 3, "norm.weight": 1, "layers.0.ffn.up_proj.weight": 5,
        "heads.lm.regular.weight": 7, "heads.lm.added.weight": 3, "heads.t.weight": 3, "heads.t.bias": 3,
    }  # fmt: skip
    graph = StateGraph(
        exporter(config, LAYERS), {name: TensorSpec((rows, 4), torch.float32) for name, rows in ours.items()}
    )
    assert {name: value.text() for name, value in graph.outputs.items()} == {
        EMBED: "concatenate(embedding.regular.weight, embedding.added.weight; 0)",
        "model.norm.weight": "norm.weight",
        LAYER: "layers.0.ffn.up_proj.weight",
        "lm_head.weight": "concatenate(heads.lm.regular.weight, heads.lm.added.weight; 0)",
        "heads.t.weight": "heads.t.weight",
        "heads.t.bias": "heads.t.bias",
    }
    tied = StateGraph(exporter(model(tied=True), []), specs("embedding.weight", "norm.weight"))
    assert set(tied.outputs) == {EMBED, "model.norm.weight"}


def test_biases_have_the_names_of_their_weights() -> None:
    mapper = Parallel(*layer_names({"self_attn.q_proj": "attention.q_proj", "mlp.up": "ffn.up"}, {"q_proj"}))
    names = [f"model.layers.7.{name}" for name in ("self_attn.q_proj.weight", "self_attn.q_proj.bias", "mlp.up.weight")]
    assert {name: value.text() for name, value in StateGraph(mapper, specs(*names)).outputs.items()} == {
        "layers.7.attention.q_proj.weight": names[0],
        "layers.7.attention.q_proj.bias": names[1],
        "layers.7.ffn.up.weight": names[2],
    }


@pytest.mark.parametrize(
    ("dim", "sizes", "wanted"),
    [
        (1, None, "2 equal parts"),
        (3, None, "2 equal parts"),
        (-1, None, "2 equal parts"),
        (3, (0, 1), "parts of [0, 1]"),
    ],
)
def test_a_dimension_that_cannot_be_cut_is_named(dim: int, sizes: Any, wanted: str) -> None:
    tensors = {"x": TensorSpec((4, 3), torch.float32)}
    with pytest.raises(CheckpointError) as caught:
        StateGraph(Chunk("x", ("a", "b"), dim, sizes), tensors)
    assert f"dimension {dim} of [4, 3] cannot be cut into {wanted}" in str(caught.value)
