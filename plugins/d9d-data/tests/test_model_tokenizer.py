"""The tokenizer of the model that training starts from is the default, and another one has to agree with it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from d9d_core.data import DataContext
from d9d_core.errors import DataError
from d9d_data.config import TextConfig
from d9d_data.stream.text import TextStream, build_text
from d9d_data.tokenizer.base import TextTokenizer
from tokenizers import Tokenizer, models, processors


def save(directory: Path, tokens: Sequence[str]) -> Path:
    directory.mkdir()
    backend = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=[]))
    backend.add_special_tokens(["<|endoftext|>"])
    backend.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    return directory


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save(tmp_path / "model", "abc")


def opened(tmp_path: Path, pretrained: Path | str | None, **values: Any) -> TextStream:
    (tmp_path / "a.txt").write_text("abcabc" * 9)
    config = TextConfig.model_validate({"sources": [str(tmp_path / "a.txt")], "sequence_length": 8} | values)
    context = DataContext(0, 1, 1, tmp_path / "cache", pretrained=None if pretrained is None else str(pretrained))
    return build_text(config, context)


def test_it_is_the_default_and_an_export_has_its_files_anyway(tmp_path: Path, model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"")
    for location in (model, model / "model.safetensors"):
        stream = opened(tmp_path, location)
        assert stream.facts["vocab_size"] == 4
        stream.save_assets(tmp_path / "assets")
        assert not (tmp_path / "assets").exists()
    assert opened(tmp_path, None).facts["vocab_size"] == 257


def test_a_tokenizer_that_is_named_goes_along_with_its_template(tmp_path: Path, model: Path) -> None:
    larger = save(tmp_path / "larger", ["a", "b", "c", "<|endoftext|>", "d"])
    stream = opened(tmp_path, model, tokenizer=str(larger))
    stream.save_assets(tmp_path / "assets")
    names = {file.name for file in (tmp_path / "assets").iterdir()}
    assert names == {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert json.loads((tmp_path / "assets" / "tokenizer_config.json").read_text())["eos_token"] == "<|endoftext|>"
    again = save(tmp_path / "again", "abc")
    assert opened(tmp_path, model, tokenizer=str(again)).facts["vocab_size"] == 4


@pytest.mark.parametrize(
    ("tokenizer", "text"),
    [
        ("bytes", r"bytes \(257 tokens\) does not belong .* \(4 tokens\): 'a' is 0 there and has the id 97 here"),
        ({"bpe": 300}, "a tokenizer trained here cannot belong to existing weights; the model has .*tokenizer.json"),
        ("OTHER", r"does not belong to the weights, .*: 'b' is 1 there and is unknown here; remove data.tokenizer"),
    ],
)
def test_one_that_gives_tokens_other_ids_is_refused(tmp_path: Path, model: Path, tokenizer: Any, text: str) -> None:
    other = save(tmp_path / "other", "axc")
    with pytest.raises(DataError, match=text):
        opened(tmp_path, model, tokenizer=str(other) if tokenizer == "OTHER" else tokenizer)


def test_a_model_without_one_needs_a_name(tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    for location in (str(tmp_path / "bare"), "s3://bucket/model"):
        with pytest.raises(DataError, match="there is no tokenizer.json next to the weights of .*; name the tokenizer"):
            opened(tmp_path, location)
        assert opened(tmp_path, location, tokenizer="bytes").facts["vocab_size"] == 257


@pytest.mark.parametrize(
    ("form", "before", "after", "adds_end"),
    [
        ("$A", 0, 0, False), ("<s> $A", 1, 0, False), ("$A </s>", 0, 1, True), ("<s> $A </s>", 1, 1, True),
        ("$A <s>", 0, 1, False), ("$A <s> </s>", 0, 2, True), ("$A </s> <s>", 0, 2, False),
    ],
)  # fmt: skip
def test_a_tokenizer_adds_the_end_if_it_is_the_last_token_after_a_text(
    form: str, before: int, after: int, adds_end: bool
) -> None:
    backend = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate("abc")}, merges=[]))
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single=form, special_tokens=[("<s>", 3), ("</s>", 4)])
    made = TextTokenizer(backend, "</s>", "a tokenizer")
    assert (made.adds_after, made.adds_end) == (after, adds_end)
    (ids,) = made.encode(["abc"])
    assert ids[before : len(ids) - after].tolist() == [0, 1, 2]
    assert made.ended(ids).tolist() == [*ids.tolist(), *([] if adds_end else [4])]


def test_only_special_tokens_are_looked_for_in_texts_the_longest_first() -> None:
    backend = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate("abc")}, merges=[]))
    backend.add_special_tokens(["</s>", "</s><s>"])
    backend.add_tokens(["abc"])
    made = TextTokenizer(backend, "</s>", "a tokenizer")
    assert made.specials == ("</s><s>", "</s>")
    assert made.spelled(["abc", "a</s><s>", "</s>"]) == "</s><s>"
    assert made.spelled(["abc", "s>"]) == ""
    assert (made.vocab_size, made.end_of_text_id, made.quoted) == (6, 3, "text")
