"""The dataset ``labelled``: texts with a label each, and words with a label for each."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from d9d_core.data import DataContext
from d9d_core.errors import DataError
from d9d_data.cli.samples import marked, samples_of
from d9d_data.config import CorpusConfig, DocumentsConfig, LabelledConfig, TextConfig
from d9d_data.corpus import plan
from d9d_data.stream.documents import DocumentStream, build_documents
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from tokenizers import Tokenizer, models, pre_tokenizers, processors

Open = Callable[..., DocumentStream]


@pytest.fixture
def stream(tmp_path: Path) -> Open:
    def build(*records: Any, batch: int = 0, notes: list[str] | None = None, **values: Any) -> DocumentStream:
        (tmp_path / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        fields = {"sources": [str(tmp_path / "data.jsonl")], "sequence_length": 32, "shuffle": False, **values}
        note = (lambda _text: None) if notes is None else notes.append
        batch = batch or max(1, len(records))
        context = DataContext(0, batch, batch, tmp_path / "cache", note=note)
        return build_documents(LabelledConfig.model_validate({**fields, "bucket_window": batch}), context)

    return build


def texts_of(stream: DocumentStream) -> dict[str, int]:
    """Label of each text of a pack."""
    (batch,) = stream.next_pack()
    rows = zip(batch["tokens"], batch["lengths"].tolist(), batch["labels"].tolist(), strict=True)
    return {bytes(tokens[:length].tolist()).decode(): label for tokens, length, label in rows}


def test_texts_have_the_number_of_their_name_in_sorted_order(stream: Open) -> None:
    reader = stream({"text": "good", "label": "pos"}, {"text": "bad!", "label": "neg"}, {"text": "é", "label": -100})
    (batch,) = reader.next_pack()
    assert {name: tuple(tensor.shape) for name, tensor in batch.items()} == {
        **dict.fromkeys(("tokens", "positions", "documents"), (3, 8)), "lengths": (3,), "labels": (3,)
    }  # fmt: skip
    assert all(tensor.dtype == torch.int64 for tensor in batch.values())
    assert texts_of(reader) == {"good": 1, "bad!": 0, "é": -100}
    facts = reader.facts
    assert (facts["num_classes"], facts["labels"], facts["samples"]) == (2, ["neg", "pos"], 3)
    renamed = stream({"text": "good", "mood": 1, "label": 0}, {"text": "bad!", "mood": 0, "label": 1}, label="mood")
    assert texts_of(renamed) == {"good": 1, "bad!": 0}


@pytest.mark.parametrize(
    ("labels", "fields", "expected", "count"),
    [
        ((3, 0, 1), {}, [3, 0, 1], 4),
        (("b", "a", "c"), {"labels": ["c", "b", "a"]}, [1, 2, 0], 3),
        ((2, "a", 0), {"labels": ["c", "b", "a"]}, [2, 2, 0], 3),
        (("2", "a", "0"), {"labels": ["c", "b", "a"]}, [2, 2, 0], 3),
        (("2", "1", "1"), {"labels": ["1", "2"]}, [1, 0, 0], 2),
        ((True, False, True), {}, [1, 0, 1], 2),
        ((1.0, 0.0, 1.0), {}, [1, 0, 1], 2),
        (("10", "9", "2"), {}, [10, 9, 2], 11),
        (("10", "9", "two"), {}, [0, 1, 2], 3),
    ],
)
def test_numbers_are_classes_and_lists_give_names_theirs(
    stream: Open, labels: tuple[Any, ...], fields: dict[str, Any], expected: list[int], count: int
) -> None:
    texts = ["x", "yy", "zzz"]
    reader = stream(*({"text": text, "label": label} for text, label in zip(texts, labels, strict=True)), **fields)
    assert texts_of(reader) == dict(zip(texts, expected, strict=True))
    assert reader.facts["num_classes"] == count


def test_columns_have_any_names_and_a_second_text_is_joined(tmp_path: Path, stream: Open) -> None:
    with (tmp_path / "a.csv").open("w", newline="") as file:
        csv.writer(file).writerows(
            [["premise", "hypothesis", "gold"], ["it rains", "wet", "yes"], ["sun", "wet", "no"]]
        )
    backend = Tokenizer(
        models.BPE(vocab={c: n for n, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens(["[CLS]", "[SEP]"])
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 256), ("[SEP]", 257)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    fields = {"sources": [str(tmp_path / "a.csv")], "field": "premise", "pair": "hypothesis", "label": "gold"}
    reader = stream(batch=2, tokenizer=str(tmp_path / "tokenizer.json"), **fields)
    (batch,) = reader.next_pack()
    own = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    wanted = {tuple(own.encode("it rains", "wet").ids): 1, tuple(own.encode("sun", "wet").ids): 0}
    rows = zip(batch["tokens"].tolist(), batch["lengths"].tolist(), batch["labels"].tolist(), strict=True)
    assert {tuple(tokens[:length]): label for tokens, length, label in rows} == wanted


def test_the_first_token_of_each_word_has_its_label(stream: Open) -> None:
    reader = stream({"tokens": ["ab", "é", "c"], "ner_tags": ["B", "O", "B"]}, per="word")
    (batch,) = reader.next_pack()
    length = int(batch["lengths"])
    assert bytes(batch["tokens"][0, :length].tolist()).decode() == "ab é c"
    n = -100
    assert batch["labels"][0].tolist() == [0, n, n, 1, n, n, 0, n]
    assert (length, reader.facts["labels"]) == (7, ["B", "O"])
    sample = next(samples_of(reader))
    assert sample.marks is not None
    assert sample.marks.tolist() == [True, False, False, True, False, False, True]


words = st.lists(
    st.text(st.characters(codec="utf-8", exclude_categories=["Z", "C"]), min_size=1, max_size=6), min_size=1, max_size=8
)


@pytest.mark.thorough
@settings(max_examples=20)
@given(words)
def test_words_and_labels_stay_together(tmp_path_factory: pytest.TempPathFactory, words: list[str]) -> None:
    directory = tmp_path_factory.mktemp("words")
    record = {"tokens": words, "labels": list(range(len(words)))}
    more = {"tokens": ["x"], "labels": [1]}
    (directory / "a.jsonl").write_text(json.dumps(record) + "\n" + json.dumps(more) + "\n")
    config = LabelledConfig(sources=(str(directory / "a.jsonl"),), per="word", sequence_length=256, shuffle=False)
    (batch,) = build_documents(config, DataContext(0, 2, 2, directory / "cache")).next_pack()
    row = int((batch["labels"] >= 0).sum(1).argmax()) if len(words) > 1 else int(batch["labels"].max(1).values.argmin())
    tokens, labels = batch["tokens"][row].tolist(), batch["labels"][row].tolist()
    text = " ".join(words).encode()
    assert bytes(tokens[: int(batch["lengths"][row])]) == text
    begins = [len(" ".join(words[:number]).encode()) + (number > 0) for number in range(len(words))]
    assert [labels[begin] for begin in begins] == list(range(len(words)))
    assert sum(label >= 0 for label in labels) == len(words)


@pytest.mark.parametrize(
    ("record", "fields", "message"),
    [
        ({"label": "a"}, {}, r"has no text in a field 'text' \(it has label\)"),
        ({"text": " \n", "label": "a"}, {}, r"has no text in a field 'text' \(it has text, label\)"),
        ({"text": "x"}, {}, r"has no label in a field 'label' \(it has text\)"),
        ({"text": "x", "label": None}, {}, "label is empty"),
        ({"text": "x", "label": ["a"]}, {}, "label is a list"),
        ({"text": "x", "label": -1}, {}, "label is -1; class numbers are 0 to"),
        ({"text": "x", "label": 2}, {"labels": ["a", "b"]}, "label is 2; class numbers are 0 to 1"),
        ({"text": "x", "label": "good"}, {"labels": ["goods", "b"]}, "unknown name 'good'; did you mean 'goods'"),
        ({"tokens": ["x"], "labels": ["a", "b"]}, {"per": "word"}, "has 1 words in tokens and 2 labels in labels"),
        ({"tokens": ["x", ""], "labels": ["a", "b"]}, {"per": "word"}, r"tokens\[1\] is empty"),
        ({"tokens": "x y", "labels": ["a", "b"]}, {"per": "word"}, "has no list of words in a field 'tokens'"),
        ({"tokens": ["x"]}, {"per": "word"}, "has no list of labels in a field 'labels'"),
        ({"tokens": ["x", "y"], "labels": ["a", "z"]}, {"per": "word", "labels": ["a", "b"]},
         r"labels\[1\] is the unknown name 'z'"),
    ],
)  # fmt: skip
def test_a_wrong_label_is_refused_with_its_place_or_skipped(
    stream: Open, record: dict[str, Any], fields: dict[str, Any], message: str
) -> None:
    one, two = (
        ({"text": "x", "label": 0}, {"text": "y", "label": 1})
        if "per" not in fields
        else ({"tokens": ["x"], "labels": ["a"]}, {"tokens": ["y"], "labels": ["b"]})
    )
    with pytest.raises(DataError, match=rf"data.jsonl:3:? .*{message}"):
        stream(one, two, record, **fields)
    reader = stream(one, two, record, malformed="skip", batch=2, **fields)
    assert (reader.facts["samples"], reader.facts["skipped"]) == (2, 1)


def test_names_and_numbers_are_not_mixed_and_one_class_is_none(stream: Open) -> None:
    with pytest.raises(DataError, match=r"some labels are names \('a'\) and others numbers \(1\)"):
        stream({"text": "x", "label": "a"}, {"text": "y", "label": 1})
    with pytest.raises(DataError, match="labels of 1 classes; name another field"):
        stream({"text": "x", "label": "a"}, {"text": "y", "label": "a"})


def test_a_long_text_is_cut_and_counted(stream: Open) -> None:
    notes: list[str] = []
    reader = stream({"text": "x" * 50, "label": 0}, {"text": "y", "label": 1}, notes=notes)
    assert texts_of(reader) == {"y": 1, "x" * 32: 0}
    assert reader.facts["cut_documents"] == 1
    assert any("cut 1 of 2 labelled records to 32 tokens, longest 50" in note for note in notes)


@pytest.mark.thorough
def test_classes_are_those_of_the_whole_corpus_whatever_shards_it_has(
    stream: Open, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    names = ["d", "b", "a", "c", "b", "d"] * 4
    records = [{"text": f"{number} " + "x" * number, "label": name} for number, name in enumerate(names)]
    whole = texts_of(stream(*records))
    monkeypatch.setattr(plan, "SHARD_BYTES", 100)
    (tmp_path / "cache").rename(tmp_path / "before")
    assert texts_of(stream(*records)) == whole
    assert {text.split()[0]: label for text, label in whole.items()} == {
        str(number): "abcd".index(name) for number, name in enumerate(names)
    }


def test_docstrings_of_this_python_are_labelled_by_what_they_describe(tmp_path: Path) -> None:
    config = LabelledConfig(sources=("python:kinds",), sequence_length=64, tokenizer="bytes")
    from d9d_data.corpus.prepare import prepare
    from d9d_data.sources import find, python

    files = [file for file in python.kinds() if file.name.endswith(("/json/decoder.py", "/json/encoder.py"))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(find, "_PYTHON", {"python:kinds": lambda: files})
        corpus = prepare(config, tmp_path, lambda _text: None)
    assert corpus.label_names == ("class", "function", "module")
    assert corpus.labels is not None
    assert corpus.labels[corpus.starts[0]] == 2  # a file begins with its own
    assert bytes(corpus.tokens[: corpus.starts[1]].tolist()).startswith(b"Implementation of JSONDecoder")


def test_samples_are_shown_with_their_labels(stream: Open, tmp_path: Path) -> None:
    reader = stream({"text": "good", "label": "pos"}, {"text": "bad!", "label": "neg"})
    reader.save_assets(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    shown = [(s.label, marked(s, tokenizer).plain) for s, _ in zip(samples_of(reader), range(2), strict=False)]
    assert sorted(shown) == [("neg", "bad!"), ("pos", "good")]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"labels": ["a", "a"]}, "a name appears twice"),
        ({"labels": ["a"]}, "at least 2"),
        ({"per": "word", "pair": "other"}, "only texts with one label can be joined"),
        ({"per": "word", "tokenizer": {"bpe": 300}}, "cannot be trained on lists of words"),
    ],
)
def test_fields_that_do_not_fit_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        LabelledConfig.model_validate({"sources": ["a.jsonl"], "sequence_length": 8, **fields})


@pytest.mark.parametrize("config", [LabelledConfig, DocumentsConfig, TextConfig])
def test_a_field_of_the_text_may_have_one_letter_but_not_none(config: type[CorpusConfig]) -> None:
    values = {"sources": ["a.jsonl"], "sequence_length": 8}
    assert config.model_validate({**values, "field": "x"}).field == "x"
    with pytest.raises(ValidationError):
        config.model_validate({**values, "field": ""})
