"""The datasets keep what holds for every one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
from d9d_testing.suites.dataset import DatasetSuite
from tokenizers import Tokenizer, models, pre_tokenizers

WORDS = ["quick", "brown", "fox", "jumps", "over", "lazy", "dog", "and", "runs", "away", "from", "it", "all"]


class OverFiles(DatasetSuite):
    other: ClassVar = {"sequence_length": 8}

    def fields(self, directory: Path) -> Mapping[str, Any]:
        for index in range(40):
            text = " ".join(WORDS[(index * 3 + place) % len(WORDS)] for place in range(2 + index % 7))
            (directory / f"{index:02}.txt").write_text(f"{index} {text}\n")
        return {"sources": [str(directory)], "sequence_length": 16}


@pytest.mark.thorough
class TestText(OverFiles):
    target = "text"
    workers = None  # they start slowly, and are the workers of the other dataset


@pytest.mark.thorough
class TestBestFitText(OverFiles):
    target = "text"
    config: ClassVar = {"packing": "best_fit"}
    workers = None


@pytest.mark.thorough
class TestDocuments(OverFiles):
    target = "documents"
    too_long: ClassVar = {"sequence_length": 8}


class TestDocumentsInOrder(OverFiles):
    target = "documents"
    config: ClassVar = {"shuffle": False, "bucket_window": 16}
    shuffled = False
    workers = None


def write_model(directory: Path) -> None:
    """A tokenizer and a chat template."""
    vocabulary = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens(["<|endoftext|>", "<|im_end|>"])
    backend.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )


class OverConversations(DatasetSuite):
    target = "chat"
    other: ClassVar = {"sequence_length": 88}
    too_long: ClassVar = {"sequence_length": 40}

    def fields(self, directory: Path) -> Mapping[str, Any]:
        write_model(directory)
        records = [
            {"prompt": f"{index}?", "completion": " ".join(WORDS[index % 5 : index % 5 + index % 7 + 1])}
            for index in range(60)
        ]
        (directory / "chats.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        return {"sources": [str(directory / "chats.jsonl")], "sequence_length": 96, "tokenizer": str(directory)}


@pytest.mark.thorough
class TestChat(OverConversations):
    workers = None


@pytest.mark.thorough
class TestChatInARow(OverConversations):
    workers = None
    config: ClassVar = {"packing": "concat"}


@pytest.mark.thorough
class TestPackedChat(OverConversations):
    workers = None
    config: ClassVar = {"packing": "best_fit"}


@pytest.mark.thorough
class TestPreference(DatasetSuite):
    target = "preference"
    other: ClassVar = {"sequence_length": 88}
    too_long: ClassVar = {"sequence_length": 48}
    rows_per_sample = 2
    workers = None

    def fields(self, directory: Path) -> Mapping[str, Any]:
        write_model(directory)
        records = [
            {
                "prompt": [{"role": "user", "content": f"{index}?"}],
                "chosen": [{"role": "assistant", "content": " ".join(WORDS[: index % 5 + 1])}],
                "rejected": [{"role": "assistant", "content": " ".join(WORDS[5 : 7 + index % 7])}],
            }
            for index in range(60)
        ]
        (directory / "pairs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        return {"sources": [str(directory / "pairs.jsonl")], "sequence_length": 96, "tokenizer": str(directory)}


class OverTokens(DatasetSuite):
    target = "tokens"
    other: ClassVar = {"sequence_length": 8}
    too_long: ClassVar = {"sequence_length": 16}
    workers = None

    def fields(self, directory: Path) -> Mapping[str, Any]:
        write_model(directory)
        records = [
            {"input_ids": [index, *range(3, 12 + index % 15)], "labels": [-100, -100, *range(4, 12 + index % 15)]}
            for index in range(60)
        ]
        (directory / "rows.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        return {"sources": [str(directory / "rows.jsonl")], "sequence_length": 24, "tokenizer": str(directory)}


@pytest.mark.thorough
class TestTokens(OverTokens):
    pass


@pytest.mark.thorough
class TestTokensInARow(OverTokens):
    config: ClassVar = {"packing": "concat"}


@pytest.mark.thorough
class TestPackedTokens(OverTokens):
    config: ClassVar = {"packing": "best_fit"}


@pytest.mark.thorough
class TestLabelled(DatasetSuite):
    target = "labelled"
    other: ClassVar = {"sequence_length": 8}
    too_long: ClassVar = {"sequence_length": 16}
    workers = None

    def fields(self, directory: Path) -> Mapping[str, Any]:
        records = [{"text": f"{index} " + " ".join(WORDS[: index % 7]), "label": index % 3} for index in range(60)]
        (directory / "texts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        return {"sources": [str(directory / "texts.jsonl")], "sequence_length": 24}


@pytest.mark.thorough
class TestLabelledWords(DatasetSuite):
    target = "labelled"
    config: ClassVar = {"per": "word"}
    other: ClassVar = {"sequence_length": 8}
    too_long: ClassVar = {"sequence_length": 16}
    workers = None

    def fields(self, directory: Path) -> Mapping[str, Any]:
        records = [
            {"tokens": [str(index), *WORDS[: index % 7]], "labels": ["n", *"wordwor"[: index % 7]]}
            for index in range(60)
        ]
        (directory / "words.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        return {"sources": [str(directory / "words.jsonl")], "sequence_length": 24}


@pytest.mark.thorough
class TestPairs(DatasetSuite):
    target = "pairs"
    config: ClassVar = {"negatives": 1}
    other: ClassVar = {"sequence_length": 8}
    too_long: ClassVar = {"sequence_length": 16}
    rows_per_sample = 3
    workers = None

    def fields(self, directory: Path) -> Mapping[str, Any]:
        records = [
            {"query": f"{index}?", "positive": " ".join(WORDS[: index % 7 + 1]), "negative": f"{index} not"}
            for index in range(60)
        ]
        (directory / "pairs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        return {"sources": [str(directory / "pairs.jsonl")], "sequence_length": 24}
