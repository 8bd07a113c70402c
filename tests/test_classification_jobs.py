"""Classifiers of texts and of words, as a user trains them: from labelled data to a model of transformers."""

from __future__ import annotations

import io
import json
import keyword
import tokenize
from pathlib import Path
from typing import Any

import pytest
import torch
from d9d_data.sources import python
from d9d_engine.job import Job
from d9d_testing.layouts import Harness, assert_passed
from d9d_testing.logs import read_log
from d9d_verify.layouts import Layout

EXAMPLE = Path(__file__).parents[1] / "examples" / "classification" / "job.yaml"
PLUGINS = (
    "d9d_nn.plugin", "d9d_data.plugin", "d9d_optim.plugin", "d9d_parallel.plugin", "d9d_pipeline.plugin",
    "d9d_qwen3.plugin",
)  # fmt: skip
SIZES = {
    "name": "qwen3", "vocab_size": 257, "hidden_size": 32, "intermediate_size": 48, "num_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_positions": 64,
}  # fmt: skip
pytestmark = pytest.mark.full


def lexical_classes() -> list[dict[str, Any]]:
    """Lines of a module of this Python: words, and the lexical class that the tokenizer of the language gives them."""
    source = (Path(json.__file__).parent / "decoder.py").read_text()
    lines: dict[int, list[tuple[str, str]]] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        kind = tokenize.tok_name[token.type]
        if token.start[0] == token.end[0] and token.string.strip() and len(token.string) < 40:
            kind = "KEYWORD" if keyword.iskeyword(token.string) else kind
            lines.setdefault(token.start[0], []).append((token.string, kind))
    return [{"tokens": [word for word, _ in line], "labels": [kind for _, kind in line]} for line in lines.values()]


@pytest.fixture
def words(tmp_path: Path) -> dict[str, Any]:
    """A job that learns lexical classes."""
    records = lexical_classes()
    (tmp_path / "words.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    classes = sorted({label for record in records for label in record["labels"]})
    return {
        "run": {"name": "words", "dir": str(tmp_path / "runs")}, "steps": 60, "device": "cpu",
        "batch": {"size": 16, "microbatch": 16}, "task": "token_classification",
        "trackers": [{"name": "jsonl", "picture": False}],
        "model": {**SIZES, "heads": {"tags": {"kind": "token_classification", "num_classes": len(classes)}}},
        "data": {"name": "labelled", "per": "word", "sources": [str(tmp_path / "words.jsonl")], "sequence_length": 64},
        "optimizer": {"name": "adamw", "lr": 0.01}, "logging": {"every": 10},
    }  # fmt: skip


def test_the_example_tells_docstrings_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    # A part of the library, so that the tokenizer is trained in a second.
    files = [file for file in python.kinds() if "/asyncio/" in file.name or "/email/" in file.name]
    monkeypatch.setattr("d9d_data.sources.find._PYTHON", {"python:kinds": lambda: files})
    overrides = [
        f"run.dir={tmp_path}/runs", "device=cpu", "steps=40",
        "batch={size: 8, microbatch: 8}", "logging.every=5", "evaluation=null",
        "trackers=[{name: jsonl, picture: false}]",
    ]  # fmt: skip
    Job.load(EXAMPLE, overrides=overrides).build(lambda _text: None).train()
    losses = [line["loss"] for line in read_log(tmp_path / "runs" / "classification") if "loss" in line]
    assert losses[-1] < 0.8 * losses[0]
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "runs/classification/model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "runs/classification/model")
    assert model.config.id2label == {0: "class", 1: "function", 2: "module"}
    with torch.no_grad():
        logits = model.eval()(**tokenizer("Return the number of items.", return_tensors="pt")).logits[0]
    assert model.config.id2label[int(logits.argmax())] == "function"


def test_words_are_classified_and_transformers_gives_the_same_logits(words: dict[str, Any], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    (tmp_path / "job.json").write_text(json.dumps(words))
    trainer = Job.load(tmp_path / "job.json").build(lambda _text: None)
    trainer.train()
    losses = [line["loss"] for line in read_log(tmp_path / "runs" / "words") if "loss" in line]
    assert losses[-1] < 0.5 * losses[0]
    theirs = transformers.AutoModelForTokenClassification.from_pretrained(tmp_path / "runs/words/model").eval()
    assert "KEYWORD" in theirs.config.label2id
    tokens = torch.tensor([list(b"if value is None : return 3")])
    with torch.no_grad():
        expected, found = theirs(tokens).logits, trainer.stage(tokens=tokens)["class_logits"]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert theirs.config.id2label[int(expected[0, 0].argmax())] == "KEYWORD"


def test_words_train_alike_in_every_layout(words: dict[str, Any]) -> None:
    values = words | {"steps": 3, "trackers": [], "export": False, "batch": {"size": 4, "microbatch": 4}}
    layouts = [
        Layout("fsdp 2", {"dp_shard": 2}, ["fsdp"], ("batch.microbatch=1",)),
        Layout("pp 2", {"pp": 2}, [], ("pipeline.name=zb1p", "batch.microbatch=1")),
        Layout("tp 2", {"tp": 2}, ["tensor_parallel"], ("batch.microbatch=2",)),
        Layout("cp 2", {"cp": 2}, ["context_parallel"], ("batch.microbatch=2",)),
    ]
    assert_passed(Harness(values, PLUGINS, 3).compare(layouts))


@pytest.mark.full
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_texts_train_alike_where_ranks_share_their_positions(tmp_path: Path, pooling: str) -> None:
    records = [{"text": "abc " * (1 + n % 5) + str(n), "label": "more" if n % 2 else "less"} for n in range(24)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    values = {
        "run": {"name": "texts", "dir": str(tmp_path / "runs")}, "steps": 3, "device": "cpu",
        "batch": {"size": 4, "microbatch": 4}, "task": "classification", "trackers": [], "export": False,
        "model": {**SIZES, "heads": {"topic": {"kind": "classification", "num_classes": 2, "pooling": pooling}}},
        "data": {"name": "labelled", "sources": [str(tmp_path / "texts.jsonl")], "sequence_length": 64},
        "optimizer": {"name": "adamw", "lr": 0.01}, "gradient_clipping": {"max_norm": None},
    }  # fmt: skip
    values["evaluation"] = {"every": 3, "packs": 1, "data": values["data"]}
    ring = {"name": "context_parallel", "method": "ring"}
    layouts = [
        Layout("cp 2", {"cp": 2}, ["context_parallel"], ("batch.microbatch=2",)),
        Layout("cp 2 x tp 2", {"cp": 2, "tp": 2}, [ring, "tensor_parallel"], ("batch.microbatch=2",)),
        Layout("cp 2 x pp 2", {"cp": 2, "pp": 2}, [ring], ("pipeline.name=zb1p", "batch.microbatch=1")),
    ]
    assert_passed(Harness(values, PLUGINS, 3).compare(layouts))
