from __future__ import annotations

import json
from pathlib import Path

import pytest

TEXT = "Hello,  world!\n\n\ttabs — ünïcödé 漢字 🙂 it's x . y\r\n"


def save(open_stream, corpus: Path, directory: Path, tokenizer: object) -> None:
    open_stream(corpus, tokenizer=tokenizer).save_assets(directory)
    # An exported model is in the same directory, and its type must not change which tokenizer is loaded.
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}))


@pytest.mark.thorough
@pytest.mark.parametrize("tokenizer", ["bytes", {"bpe": 300}])
def test_exported_tokenizer_loads_in_transformers_and_round_trips(
    open_stream, corpus: Path, tmp_path: Path, tokenizer: object
) -> None:
    transformers = pytest.importorskip("transformers")
    save(open_stream, corpus, tmp_path / "out", tokenizer)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert loaded.decode(loaded.encode(TEXT)) == TEXT
    assert loaded.eos_token == "<|endoftext|>"
    assert loaded.eos_token_id == (256 if tokenizer == "bytes" else 0)
    assert len(loaded) == (257 if tokenizer == "bytes" else 300)
    if tokenizer == "bytes":
        assert loaded.encode(TEXT) == list(TEXT.encode())


def test_exported_tokenizer_encodes_as_training_did(open_stream, corpus: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    stream = open_stream(corpus, tokenizer={"bpe": 300})
    stream.save_assets(tmp_path / "out")
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    first = (corpus / "00.txt").read_text(encoding="utf-8")
    ids = loaded.encode(first)
    assert stream._corpus.tokens[: len(ids) + 1].tolist() == [*ids, loaded.eos_token_id]


def test_exported_files_work_as_a_tokenizer_file(open_stream, corpus: Path, tmp_path: Path) -> None:
    trained = open_stream(corpus, tokenizer={"bpe": 300}, end_of_text="<end>")
    trained.save_assets(tmp_path / "out")
    read = open_stream(corpus, tokenizer=str(tmp_path / "out"))
    assert read._corpus.tokens.tolist() == trained._corpus.tokens.tolist()
    read.save_assets(tmp_path / "again")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert json.loads((tmp_path / "again" / name).read_text()) == json.loads((tmp_path / "out" / name).read_text())
