"""Protocol of tokenizers: token ids of texts, and the files that go along with an exported model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers

Ids = npt.NDArray[np.integer[Any]]
#: Files of a Hugging Face tokenizer besides ``tokenizer.json``.
CONFIG_FILE, TOKENIZER_FILE = "tokenizer_config.json", "tokenizer.json"
#: Others, which are taken along as they are.
BESIDE = ("chat_template.jinja", "special_tokens_map.json", "added_tokens.json")


class TextTokenizer:
    """Tokenizer of texts.

    Args:
        backend: the tokenizer.
        end_of_text: the token that ends documents; part of the vocabulary.
        description: name of the tokenizer, for people.
        config: contents of ``tokenizer_config.json``.
        beside: further files that go along with an exported model, by name.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        end_of_text: str,
        description: str,
        config: dict[str, Any] | None = None,
        beside: Mapping[str, bytes] | None = None,
    ) -> None:
        # A document that quotes the end-of-text token must not end there.
        backend.encode_special_tokens = True
        self._backend = backend
        self._beside = dict(beside or {})
        self._config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "eos_token": end_of_text,
        } | (config or {})
        self.description = description
        end_of_text_id = backend.token_to_id(end_of_text)
        if end_of_text_id is None:
            raise ValueError(f"the tokenizer has no token {end_of_text!r}")
        self.end_of_text_id, self.end_of_text = end_of_text_id, end_of_text
        #: One more than the largest id; ids may have gaps.
        self.vocab_size: int = max(backend.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """Token ids of each text, without special tokens."""
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, dtype=np.int64) for encoding in encodings]

    def vocabulary(self) -> dict[str, int]:
        """Ids of all tokens, in the order of the ids."""
        return dict(sorted(self._backend.get_vocab(with_added_tokens=True).items(), key=lambda item: item[1]))

    def serialised(self) -> str:
        """Content of the ``tokenizer.json``."""
        return str(self._backend.to_str(pretty=True))

    def save(self, directory: Path) -> None:
        """Write the files that ``transformers.AutoTokenizer.from_pretrained(directory)`` reads."""
        directory.mkdir(parents=True, exist_ok=True)
        # The library's own way to write a file raises plain exceptions where the disk is full.
        (directory / TOKENIZER_FILE).write_text(self.serialised(), encoding="utf-8")
        text = json.dumps(self._config, indent=2, ensure_ascii=False) + "\n"
        (directory / CONFIG_FILE).write_text(text, encoding="utf-8")
        for name, content in self._beside.items():
            (directory / name).write_bytes(content)
