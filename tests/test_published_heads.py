"""No tensor of a published model is left out without a word: heads with a tied embedding, in every reader."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

Command = Callable[..., tuple[int, str, str]]
Publish = Callable[..., Path]
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture
def model(tmp_path: Path, published: Publish) -> Path:
    """A tied model, whose head is not in the files."""
    directory = published(tmp_path / "model", tie_word_embeddings=True)
    (tmp_path / "texts.jsonl").write_text('{"text": "the quick brown fox"}\n' * 8)
    assert HEAD not in load_file(directory / "model.safetensors")
    return directory


def add_head(model: Path, change: float) -> None:
    tensors = load_file(model / "model.safetensors")
    head = tensors[EMBEDDING].clone()
    head[-1, -1] += change  # one number of one token
    save_file({**tensors, HEAD: head}, model / "model.safetensors", metadata={"format": "pt"})


def declare(model: Path, tied: bool) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": tied}))


def job(model: Path, kind: str = "causal_lm", **fields: Any) -> Path:
    data = {"name": "documents", "sources": [str(model.parent / "texts.jsonl")], "sequence_length": 32}
    values: dict[str, Any] = {
        "run": {"dir": str(model.parent / "runs"), "name": kind}, "device": "cpu",
        "model": {"name": "qwen3", "pretrained": str(model), **fields}, "task": kind, "data": data,
        "batch": {"size": 4, "microbatch": 4},
    }  # fmt: skip
    training = {"optimizer": {"name": "sgd", "lr": 0.0}, "steps": 1, "logging": {"every": 1}}
    if kind == "distillation":
        teacher = values["model"]
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_layers": 1, "num_attention_heads": 2,
                 "num_key_value_heads": 2, "max_positions": 64, "vocab_size": 259}  # fmt: skip
        values |= {"model": {"name": "qwen3", **sizes}, "task": {"name": "distillation", "teacher": teacher}}
        data |= {"tokenizer": str(model / "tokenizer.json")}
    if kind != "log_probs":
        values |= training
    path = model.parent / f"{kind}.json"
    path.write_text(json.dumps(values))
    return path


READERS: dict[str, Callable[[Path], tuple[str, ...]]] = {
    "check": lambda model: ("check", str(job(model))),
    "train": lambda model: ("train", str(job(model))),
    "evaluate": lambda model: ("evaluate", str(model), "--data", str(model.parent / "texts.jsonl")),
    "infer": lambda model: ("infer", str(job(model, "log_probs"))),
    "generate": lambda model: ("generate", str(model), "--prompt", "the", "--max-new-tokens", "2", "--device", "cpu"),
    "teacher": lambda model: ("train", str(job(model, "distillation"))),
}


@pytest.mark.thorough
@pytest.mark.parametrize("reader", [name for name in READERS if name != "generate"])
def test_a_head_that_a_tied_model_would_throw_away_is_refused(d9d: Command, model: Path, reader: str) -> None:
    add_head(model, 1e-3)
    status, out, err = d9d(*READERS[reader](model))
    assert status == 2, out
    for part in (str(model), HEAD, EMBEDDING, "tie_word_embeddings", "set model.tie_embeddings to false"):
        assert part in err


def test_generate_keeps_the_head_of_the_files_or_refuses_it(d9d: Command, model: Path) -> None:
    """As the release of transformers does: newer ones untie the two, older ones throw it away."""
    transformers = pytest.importorskip("transformers")
    add_head(model, 1.0)
    status, _, err = d9d(*READERS["generate"](model))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model)
    if torch.equal(loaded.get_output_embeddings().weight, load_file(model / "model.safetensors")[HEAD]):
        assert status == 0, err
    else:
        assert status == 2
        assert f"'{HEAD}' in the files differs from the embedding" in err


@pytest.mark.thorough
@pytest.mark.parametrize("reader", ["check", "train"])
def test_an_equal_copy_of_the_embedding_is_silent(d9d: Command, model: Path, reader: str) -> None:
    add_head(model, 0.0)
    status, out, err = d9d(*READERS[reader](model))
    assert status == 0, err
    assert HEAD not in out + err


@pytest.mark.thorough
def test_an_untied_model_keeps_the_head_of_the_files(d9d: Command, model: Path) -> None:
    transformers = pytest.importorskip("transformers")
    add_head(model, 5.0)
    job(model, tie_embeddings=False)
    status, _, err = d9d("train", str(model.parent / "causal_lm.json"))
    assert status == 0, err
    exported = model.parent / "runs" / "causal_lm" / "model"
    theirs = load_file(model / "model.safetensors")
    assert torch.equal(load_file(exported / "model.safetensors")[HEAD], theirs[HEAD])
    assert not transformers.AutoConfig.from_pretrained(exported).tie_word_embeddings


@pytest.mark.thorough
@pytest.mark.parametrize("reader", READERS)
def test_an_untied_model_without_a_head_is_refused_in_words_of_its_files(
    d9d: Command, model: Path, reader: str
) -> None:
    declare(model, tied=False)
    status, out, err = d9d(*READERS[reader](model))
    assert status == 2, out
    way_out = "needs tie_word_embeddings: true" if reader == "generate" else "set model.tie_embeddings to true"
    for part in (str(model), HEAD, way_out):
        assert part in err
    assert "Rename" not in err


@pytest.mark.thorough
def test_an_untied_model_without_a_head_can_be_tied(d9d: Command, model: Path) -> None:
    declare(model, tied=False)
    job(model, tie_embeddings=True)
    status, _, err = d9d("train", str(model.parent / "causal_lm.json"))
    assert status == 0, err


@pytest.mark.thorough
def test_tensors_that_a_model_has_no_place_for_are_named(d9d: Command, model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    old = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(8) for layer in (0, 1)}
    save_file({**tensors, **old}, model / "model.safetensors", metadata={"format": "pt"})
    status, out, err = d9d(*READERS["check"](model))
    assert status == 0, err
    said = "left out: model.layers.*.self_attn.rotary_emb.inv_freq (2 tensors)"
    assert said in " ".join(out.split())
    status, out, err = d9d(*READERS["train"](model))
    assert status == 0, err
    assert "left out, as the model has no such tensors: model.layers.*.self_attn.rotary_emb.inv_freq" in out + err
