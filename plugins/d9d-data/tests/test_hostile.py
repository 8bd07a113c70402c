"""Corpora and tokenizers that were made to harm: an error that names the file, soon, in little memory."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from d9d_core.errors import DataError
from d9d_data.config import TextConfig
from d9d_data.corpus import cache
from d9d_data.sources import find
from d9d_data.sources.records import read_records
from d9d_data.tokenizer import base
from d9d_data.tokenizer.base import TextTokenizer
from d9d_data.tokenizer.file import load_tokenizer
from d9d_testing.hostile.strangers import TOKENIZERS
from pydantic import ValidationError

#: Pre-tokenizer that makes a token of each character.
CHARACTERS = {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": False}}


def tokenizer(path: Path, **ids: int) -> Path:
    value: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "WordLevel", "vocab": {"</s>": 0, "a": 1} | ids, "unk_token": "</s>"},
    }
    path.write_text(json.dumps(value))
    return path


@pytest.mark.parametrize("largest", [2**32 - 1, 2**24])
def test_a_token_of_a_huge_id_is_refused_before_tables_are_made(tmp_path: Path, largest: int) -> None:
    file = tokenizer(tmp_path / "tokenizer.json", b=largest)
    with pytest.raises(DataError, match=f"token of id {largest:,}; a vocabulary has at most 16,777,216 ids"):
        load_tokenizer(file, None)


def changed(file: Path, change: Mapping[str, Any]) -> Path:
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    return file


@pytest.mark.thorough
@pytest.mark.parametrize("sort", ["a normalizer that multiplies", "a normalizer that prepends"])
def test_a_tokenizer_that_makes_texts_long_is_refused(sort: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"tokenizer\.json is not a tokenizer \(the tokenizer's normalizer"):
        load_tokenizer(changed(tokenizer(tmp_path / "tokenizer.json"), TOKENIZERS[sort]), None)


def test_an_expression_that_backtracks_is_an_error_of_the_tokenizer(tmp_path: Path) -> None:
    file = changed(tokenizer(tmp_path / "tokenizer.json"), TOKENIZERS["an expression that backtracks"])
    with pytest.raises(DataError, match="the tokenizer cannot encode a text"):
        load_tokenizer(file, None).encode(["the quick brown fox jumps over the lazy dog " * 4])


def words(path: Path) -> TextTokenizer:
    split = {
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": " ?[a-z]+"}, "behavior": "Isolated", "invert": False}
    }
    return load_tokenizer(changed(tokenizer(path / "tokenizer.json", **{"ab": 2, " ab": 3, " ": 4}), split), None)


@pytest.mark.parametrize("recognises", [False, True])
def test_a_long_text_is_encoded_in_pieces_as_it_is_as_a_whole(
    recognises: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = words(tmp_path)
    if recognises:
        made.recognise_special_tokens()
    texts = ["ab" + " ab" * 5000, "ab", "x"]
    whole = made.encode(texts)
    monkeypatch.setattr(base, "_LONG", 1000)
    monkeypatch.setattr(base, "_PIECE", 100)
    monkeypatch.setattr(base, "_WINDOW", 10)
    for ids, expected in zip(made.encode(texts), whole, strict=True):
        np.testing.assert_array_equal(ids, expected)
    assert "".join(base._pieces("a" * 1234)) == "a" * 1234


@pytest.mark.full
def test_a_long_text_without_spaces_takes_little_memory(tmp_path: Path) -> None:
    made = load_tokenizer(changed(tokenizer(tmp_path / "tokenizer.json"), CHARACTERS), None)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert len(made.encode(["a" * 20_000_000])[0]) == 20_000_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20, "1 GiB, in KiB; as a whole, 3.4 GiB"


def test_a_record_whose_text_would_be_encoded_as_a_whole_has_a_limit() -> None:
    with pytest.raises(DataError, match="a text of 4,194,305 characters"), base.panics_refused("a" * 4_194_305):
        pass


def test_a_vocabulary_to_train_has_a_limit() -> None:
    with pytest.raises(ValidationError, match="less than or equal"):
        TextConfig.model_validate({"sources": ["x"], "sequence_length": 1, "tokenizer": {"bpe": 10**18}})


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"[" * 10**5, b'{"a": "\\ud800"}', b"\xff", b'{"a": 1' + b"0" * 999 + b"}"])
def test_a_tokenizer_of_odd_json_is_an_error(tmp_path: Path, name: str, content: bytes) -> None:
    file = tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=name):
        load_tokenizer(file, None)


@pytest.mark.thorough
def test_a_huge_tokenizer_is_not_read(tmp_path: Path) -> None:
    file = tokenizer(tmp_path / "tokenizer.json")
    with file.open("r+b") as opened:
        opened.truncate(1 << 40)
    with pytest.raises(DataError, match="the limit for such files"):
        load_tokenizer(file, None)


@pytest.mark.parametrize(
    "line", [b'{"text": "\\ud800"}', b'{"text": ' + b"[" * 10**5, b'{"text": 1' + b"0" * 5000 + b"}"]
)
def test_a_line_that_is_no_text_is_named(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "fine"}\n' + line)
    records = read_records(tmp_path / "a.jsonl")
    assert next(records).values == {"text": "fine"}
    with pytest.raises(DataError, match="a.jsonl:2 is not JSON"):
        next(records)


def test_a_large_folder_is_named_and_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find, "_MANY", 2)
    monkeypatch.setattr(find, "MAX_FILES", 30)
    monkeypatch.setenv("HOME", str(tmp_path))
    for number in range(25):
        (tmp_path / f"{number:02}.txt").write_text("x")
    (tmp_path / ".hidden").mkdir()
    for number in range(25):
        (tmp_path / ".hidden" / f"{number:02}.txt").write_text("x")
    for source in ("~", "~/*.txt"):
        notes: list[str] = []
        assert len(find.find_files([source], note=notes.append)) == 25
        assert [note.partition(" has ")[2] for note in notes] == [
            "2 files, and the search continues",
            "20 files, and the search continues",
        ]
        assert f"data.sources[0]: {tmp_path}" in notes[0]
    monkeypatch.setattr(find, "MAX_FILES", 24)
    for source in ("~", "~/*.txt"):
        with pytest.raises(DataError, match=r"has more than 24 files; name the folder of the corpus"):
            find.find_files([source])


@pytest.mark.parametrize("source", ["a\0b", "x" * 5000, "~nobody-of-this-name/x", "[" * 3000])
def test_a_source_of_an_odd_name_is_an_error(source: str) -> None:
    with pytest.raises(DataError, match=r"data.sources\[0\]"):
        find.find_files([source])


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "", "pipe", "a\0b"])
def test_a_cached_directory_whose_manifest_leads_outside_is_damaged(tmp_path: Path, name: str) -> None:
    (tmp_path / "outside").write_text("x")
    (tmp_path / "entry").mkdir()
    os.mkfifo(tmp_path / "entry" / "pipe")
    (tmp_path / "entry" / "manifest.json").write_text(json.dumps({name: {"size": 1, "sha256": "0", "sample": "0"}}))
    damage = cache.find_damage(tmp_path / "entry")
    assert damage is not None
    assert "not a regular file" in damage or "which is not a file in its directory" in damage


@pytest.mark.parametrize("content", ["[" * 10**5, "[]", '{"a": 1}', '{"a": NaN}'])
def test_a_cached_directory_with_a_manifest_that_is_none_is_damaged(tmp_path: Path, content: str) -> None:
    (tmp_path / "manifest.json").write_text(content)
    assert cache.find_damage(tmp_path) is not None


@pytest.mark.parametrize("content", ['["a"]', '{"a": 1}'])
def test_a_manifest_without_checksums_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "a").write_text("x")
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(ValueError, match="manifest.json of the prepared data is not a table of sizes"):
        cache.file_digests(tmp_path)


def test_prepared_data_whose_manifest_names_too_little_is_made_again(
    corpus: Path, open_stream: Callable[..., Any], tmp_path: Path
) -> None:
    facts = open_stream(corpus).facts
    (entry,) = (tmp_path / "cache").iterdir()
    (entry / "manifest.json").write_text("{}")
    (entry / "facts.json").unlink()
    os.mkfifo(entry / "facts.json")  # opening it blocks forever
    notes: list[str] = []
    assert open_stream(corpus, note=notes.append).facts == facts
    assert "is damaged (manifest.json lacks facts.json, held_out.starts.npy" in notes[0]
