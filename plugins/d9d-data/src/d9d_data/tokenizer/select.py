"""Selection of the tokenizer for a config."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from d9d_core.errors import DataError
from d9d_core.untrusted import read_regular

from d9d_data.config import BpeTokenizer
from d9d_data.tokenizer.base import CONFIG_FILE, TextTokenizer
from d9d_data.tokenizer.byte_level import BytesTokenizer, load_trained_bpe, train_bpe
from d9d_data.tokenizer.file import find_tokenizer_file, load_tokenizer

#: Default end-of-text token.
END_OF_TEXT = "<|endoftext|>"


def make_tokenizer(choice: str | BpeTokenizer, end_of_text: str | None, texts: Iterable[str]) -> TextTokenizer:
    """Make, train or read the tokenizer of a config.

    Args:
        choice: ``bytes``, a path, or the settings of a tokenizer to train.
        end_of_text: end-of-text token, if the config names one.
        texts: texts to train on; unused if no tokenizer is trained.

    Raises:
        DataError: the file is missing or holds no tokenizer, or the end-of-text token cannot be used.
    """
    if isinstance(choice, BpeTokenizer):
        return train_bpe(texts, choice.bpe, end_of_text or END_OF_TEXT)
    if choice == "bytes":
        return BytesTokenizer(end_of_text or END_OF_TEXT)
    return load_tokenizer(find_tokenizer_file(choice), end_of_text)


def saved_tokenizer(choice: str | BpeTokenizer, end_of_text: str | None, directory: Path) -> TextTokenizer:
    """Make the tokenizer of :func:`make_tokenizer` again, from its saved files if it was trained.

    Args:
        choice: ``bytes``, a path, or the settings of the trained tokenizer.
        end_of_text: end-of-text token, if the config names one.
        directory: directory of the saved tokenizer, if it was trained.

    Raises:
        DataError: the file is missing or holds no tokenizer.
    """
    if isinstance(choice, BpeTokenizer):
        return load_trained_bpe(directory, end_of_text or END_OF_TEXT)
    return make_tokenizer(choice, end_of_text, ())


def tokenizer_identity(choice: str | BpeTokenizer) -> str:
    """Identity of a tokenizer; for a file, digests of it and of its ``tokenizer_config.json``, not its path.

    Raises:
        DataError: the file is missing or cannot be read.
    """
    if isinstance(choice, BpeTokenizer):
        return f"bpe {choice.bpe}"
    if choice == "bytes":
        return choice
    file = find_tokenizer_file(choice)
    parts = [part for part in (file, file.with_name(CONFIG_FILE)) if part.is_file()]
    try:
        return " ".join(hashlib.sha256(read_regular(part, links="near")).hexdigest() for part in parts)
    except OSError as error:
        raise DataError(f"data.tokenizer: cannot read {file}: {error.strerror or error}; make it readable") from error
