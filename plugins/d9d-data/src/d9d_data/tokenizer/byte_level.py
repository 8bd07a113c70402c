"""Byte-level tokenizers: every text has an encoding, and decoding gives back its exact bytes.

A byte is written in the vocabulary as one printable character (the table of GPT-2; Radford et al., Language Models are
Unsupervised Multitask Learners, section 2.2).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import numpy as np
import tokenizers
from d9d_core.errors import DataError
from d9d_core.untrusted import read_regular
from tokenizers import decoders, models, pre_tokenizers, trainers

from d9d_data.tokenizer.base import TOKENIZER_FILE, Ids, TextTokenizer


class BytesTokenizer(TextTokenizer):
    """Byte-level tokenizer: ids 0 to 255 are the bytes of the UTF-8 text, 256 is the end-of-text token.

    Raises:
        DataError: the end-of-text token is spelled like a byte's token.
    """

    def __init__(self, end_of_text: str) -> None:
        _check_distinct(end_of_text, _byte_vocabulary())
        backend = tokenizers.Tokenizer(models.BPE(vocab=_byte_vocabulary(), merges=[]))
        _make_byte_level(backend, split_words=False)
        backend.add_special_tokens([end_of_text])
        super().__init__(backend, end_of_text, "bytes (256 bytes and the end of text)")

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        if self.recognises_special_tokens:
            return super().encode(texts)
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]


def train_bpe(texts: Iterable[str], vocab_size: int, end_of_text: str) -> TextTokenizer:
    """Train a byte-level BPE tokenizer (Sennrich et al., Neural Machine Translation of Rare Words with Subword Units).

    The result is deterministic: equal texts give the same tokenizer.

    Args:
        texts: texts to learn merges from.
        vocab_size: number of tokens: 256 bytes, the end-of-text token, and merges; fewer if no pairs are left to merge.
        end_of_text: end-of-text token, which gets id 0.

    Raises:
        DataError: the end-of-text token is spelled like a byte's token or a learned token.
    """
    backend = tokenizers.Tokenizer(models.BPE())
    _make_byte_level(backend, split_words=True)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[end_of_text],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    merges = json.loads(backend.to_str())["model"]["merges"]
    _check_distinct(end_of_text, {*_byte_vocabulary(), *("".join(pair) for pair in merges)})
    return _trained(backend, end_of_text)


def load_trained_bpe(directory: Path, end_of_text: str) -> TextTokenizer:
    """Read a saved tokenizer of :func:`train_bpe`.

    Args:
        directory: directory of the tokenizer's files.
        end_of_text: end-of-text token with which the tokenizer was trained.
    """
    return _trained(tokenizers.Tokenizer.from_buffer(read_regular(directory / TOKENIZER_FILE)), end_of_text)


def _trained(backend: tokenizers.Tokenizer, end_of_text: str) -> TextTokenizer:
    return TextTokenizer(backend, end_of_text, f"byte-level BPE of {backend.get_vocab_size()} tokens, trained here")


def _check_distinct(end_of_text: str, tokens: Collection[str]) -> None:
    """Raise if the end-of-text token is also a token of ordinary text, which would end documents inside a text."""
    if end_of_text in tokens:
        raise DataError(
            f"data.end_of_text: {end_of_text!r} is also a token of ordinary text; use a string that no text contains, "
            "such as '<|endoftext|>'"
        )


def _make_byte_level(backend: tokenizers.Tokenizer, *, split_words: bool) -> None:
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split_words)
    backend.decoder = decoders.ByteLevel()


def _byte_vocabulary() -> dict[str, int]:
    """Map of printable characters to bytes: printable Latin-1 to itself, and U+0100, U+0101, ... to the other bytes."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte if byte in printable else 256 + others.index(byte)): byte for byte in range(256)}
