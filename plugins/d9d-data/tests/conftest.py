from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from d9d_core.data import DataContext
from d9d_data.config import TextConfig
from d9d_data.stream.text import TextStream, build_text
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "the",
    "lazy",
    "dog",
    "and",
    "runs",
    "away",
    "from",
    "it",
    "all",
]
#: Template of ChatML.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's tokenizer of bytes and special tokens, and its template."""
    directory = tmp_path_factory.mktemp("model")
    vocabulary = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A directory of twelve small texts."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for i in range(12):
        text = " ".join(WORDS[(i * 3 + j) % len(WORDS)] for j in range(20 + i)) + " — é\n"
        (folder / f"{i:02}.txt").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def open_stream(tmp_path: Path) -> Callable[..., TextStream]:
    """Builds a stream from config values; ``note`` and batch sizes can be given."""

    def build(
        *sources: object, batch_size: int = 4, microbatch_size: int = 2, seed: int = 0, **values: Any
    ) -> TextStream:
        note = values.pop("note", lambda _text: None)
        config = TextConfig.model_validate(
            {"sources": [str(source) for source in sources], "sequence_length": 16} | values
        )
        return build_text(
            config,
            DataContext(
                seed=seed,
                batch_size=batch_size,
                microbatch_size=microbatch_size,
                cache_dir=tmp_path / "cache",
                note=note,
            ),
        )

    return build
