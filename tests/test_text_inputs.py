"""A text means the same in use as in training: a head gets inputs as it is trained with, or the data is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from d9d_core.data import DataContext, TextInputs
from d9d_core.errors import DataError
from d9d_data.config import (
    ChatConfig,
    DocumentsConfig,
    LabelledConfig,
    PairsConfig,
    PreferenceConfig,
    TextConfig,
)
from d9d_data.stream.chat import build_chat, build_preference
from d9d_data.stream.documents import build_documents
from d9d_data.stream.text import build_text
from d9d_nn.inference.classes import Classes, HeadReader, Rewards, TokenClasses
from d9d_nn.inference.embeddings import Embeddings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

#: What tokenizers add to a text, and the token that ends texts.
KINDS = {
    "nothing": ("$A", "</s>"),
    "a beginning": ("<s> $A", "</s>"),
    "both": ("<s> $A </s>", "</s>"),
    "marks around": ("[CLS] $A [SEP]", "[SEP]"),
    "marks, another end": ("[CLS] $A [SEP]", "</s>"),
}
SPECIAL = ["<s>", "</s>", "[CLS]", "[SEP]"]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TEXTS = ["a text", "one more", "the third one"]
LONG = "a text that is longer than a sample by far"
LENGTH = 24


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def tokenizer(kind: str, tmp_path: Path) -> Path:
    single, end = KINDS[kind]
    vocabulary = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    ids = [(token, backend.token_to_id(token)) for token in SPECIAL]
    backend.post_processor = processors.TemplateProcessing(single=single, pair=f"{single} $B", special_tokens=ids)
    folder = tmp_path / "model"
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


class Data:
    """Datasets over records of texts, in training and in one pass."""

    def __init__(self, folder: Path, tokenizer: Path) -> None:
        self._folder, self._tokenizer = folder, tokenizer

    def inputs(
        self, config: type[Any], build: Any, records: list[Mapping[str, Any]], inputs: TextInputs = "own",
        *, one_pass: bool = True, **fields: Any,
    ) -> list[list[int]]:  # fmt: skip
        """Inputs of the rows, in order."""
        (self._folder / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        values = {
            "sources": [str(self._folder / "data.jsonl")], "sequence_length": LENGTH, "shuffle": False,
            "tokenizer": str(self._tokenizer), **({} if fields.get("packing") else {"bucket_window": 1}), **fields,
        }  # fmt: skip
        context = DataContext(0, 1, 1, self._folder / "cache", one_pass=one_pass, inputs=inputs)
        stream = build(config.model_validate(values), context)
        rows: list[list[int]] = []
        for _ in range(int(stream.facts["samples"])):
            (batch,) = stream.next_pack()
            for place, tokens in enumerate(batch["tokens"]):
                length = int(batch["lengths"][place]) if "lengths" in batch else len(tokens)
                documents = batch["documents"][place, :length].tolist() if fields.get("packing") else [0] * length
                pairs = list(zip(tokens[:length].tolist(), documents, strict=True))
                rows += [[token for token, d in pairs if d == document] for document in dict.fromkeys(documents)]
        return rows


@pytest.fixture
def data(tmp_path: Path, tokenizer: Path) -> Data:
    return Data(tmp_path, tokenizer)


@pytest.mark.thorough
def test_embeddings_of_documents_are_those_of_the_texts_of_pairs(data: Data) -> None:
    mode = Embeddings.text_inputs
    cases: list[tuple[list[str], dict[str, Any]]] = [(TEXTS, {}), ([LONG, "short"], {})]
    for texts, more in [*cases, ([LONG, "short"], {"too_long": "cut_start"})]:
        pairs = [{"query": text, "positive": "x"} for text in texts]
        trained = data.inputs(PairsConfig, build_documents, pairs, one_pass=False, **more)[::2]
        assert data.inputs(PairsConfig, build_documents, pairs, mode, **more)[::2] == trained
        assert data.inputs(DocumentsConfig, build_documents, [{"text": t} for t in texts], mode, **more) == trained
    packed = {"field": "text", "packing": "best_fit"}
    records = [{"text": text} for text in TEXTS]
    trained = data.inputs(DocumentsConfig, build_documents, records, mode)
    assert data.inputs(TextConfig, build_text, records, mode, **packed) == trained
    with pytest.raises(DataError, match="packing truncates them differently"):
        data.inputs(TextConfig, build_text, [{"text": LONG}], mode, **packed)


def test_embeddings_of_labelled_texts_are_those_of_pairs_or_refused(data: Data, kind: str) -> None:
    records = [{"text": text, "label": number % 2} for number, text in enumerate(TEXTS)]
    expected = data.inputs(DocumentsConfig, build_documents, records, "with_end")
    if kind in ("both", "marks around"):
        assert data.inputs(LabelledConfig, build_documents, records, "with_end") == expected
        return
    with pytest.raises(DataError, match="the head is trained with texts that end with the end-of-text token"):
        data.inputs(LabelledConfig, build_documents, records, "with_end")


@pytest.mark.thorough
def test_classes_of_documents_and_pairs_are_those_of_labelled_texts(data: Data) -> None:
    tasks: tuple[type[HeadReader], ...] = (Classes, TokenClasses)
    for task in tasks:
        for texts in (TEXTS, [LONG, "short"]):
            labelled = [{"text": text, "label": number % 2} for number, text in enumerate(texts)]
            trained = data.inputs(LabelledConfig, build_documents, labelled, one_pass=False)
            documents = [{"text": text} for text in texts]
            assert data.inputs(LabelledConfig, build_documents, labelled, task.text_inputs) == trained
            assert data.inputs(DocumentsConfig, build_documents, documents, task.text_inputs) == trained
            pairs = [{"query": text, "positive": "x"} for text in texts]
            if LONG not in texts:
                assert data.inputs(PairsConfig, build_documents, pairs, task.text_inputs)[::2] == trained
                continue
            with pytest.raises(DataError, match="the head is trained with truncate them in different ways"):
                data.inputs(PairsConfig, build_documents, pairs, task.text_inputs)
    words = [{"tokens": text.split(), "labels": [0, 1, 0, 1][: len(text.split())]} for text in TEXTS]
    trained = data.inputs(LabelledConfig, build_documents, words, one_pass=False, per="word")
    assert data.inputs(DocumentsConfig, build_documents, [{"text": t} for t in TEXTS], "as_encoded") == trained


@pytest.mark.thorough
def test_rewards_of_conversations_and_documents_are_those_of_preferences(data: Data) -> None:
    mode = Rewards.text_inputs
    prompt, sides = [{"role": "user", "content": "a?"}], ("yes", "no no")
    said = [[{"role": "assistant", "content": text}] for text in sides]
    pair = {"prompt": prompt, "chosen": said[0], "rejected": said[1]}
    more = {"sequence_length": 64}
    trained = data.inputs(PreferenceConfig, build_preference, [pair], one_pass=False, **more)
    conversations = [{"messages": prompt + one} for one in said]
    assert data.inputs(ChatConfig, build_chat, conversations, mode, **more) == trained
    assert data.inputs(PreferenceConfig, build_preference, [pair], mode, **more) == trained
    strings = {"prompt": "a?", "chosen": " yes", "rejected": " no"}
    trained = data.inputs(PreferenceConfig, build_preference, [strings], one_pass=False, **more)
    documents = [{"text": f"a?{text}"} for text in (" yes", " no")]
    assert data.inputs(DocumentsConfig, build_documents, documents, mode, **more) == trained
    pairs = [{"query": documents[0]["text"], "positive": documents[1]["text"]}]
    assert data.inputs(PairsConfig, build_documents, pairs, mode, **more) == trained
