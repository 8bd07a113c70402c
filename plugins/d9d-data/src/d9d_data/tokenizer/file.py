"""Tokenizer from a ``tokenizer.json``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
from d9d_core.errors import DataError
from d9d_core.untrusted import parse_json, read_regular
from d9d_weights.hugging_face.tokenizer_bounds import check_tokenizer

from d9d_data.config import MAX_VOCABULARY
from d9d_data.tokenizer.base import BESIDE, CONFIG_FILE, TOKENIZER_FILE, TextTokenizer

#: Usual end-of-text tokens of published tokenizers, most specific first.
_KNOWN_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "[SEP]")


def find_tokenizer_file(path: str, *, only_files: bool = False) -> Path:
    """Path of the ``tokenizer.json`` at a path, which names the file or its directory.

    Args:
        path: value of ``data.tokenizer``.
        only_files: whether the dataset takes no other tokenizers, for messages.

    Raises:
        DataError: there is no such file, or the path cannot be read.
    """
    choices = "give the path of a tokenizer.json" + ("" if only_files else ", 'bytes', or {bpe: 2048} to train one")
    try:
        given = Path(path).expanduser()
        file = given / TOKENIZER_FILE if given.is_dir() else given
        if file.is_file():
            return file
    except (OSError, RuntimeError) as error:  # a name the system refuses, no permission, an unknown home directory
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"data.tokenizer: cannot look for {path[:80]!r}: {reason}; {choices}") from error
    raise DataError(f"data.tokenizer: {str(file)!r} does not exist (from {Path.cwd()}); {choices}")


def load_tokenizer(file: Path, end_of_text: str | None) -> TextTokenizer:
    """Read a tokenizer from its file, and from a ``tokenizer_config.json`` in the same directory if there is one.

    Raises:
        DataError: the file holds no tokenizer, an id is too large, or the end-of-text token is unknown.
    """
    backend = read_tokenizer(file)
    # Files may configure truncation or padding; both would change the documents.
    backend.no_truncation()
    backend.no_padding()
    largest = max(backend.get_vocab(with_added_tokens=True).values(), default=0)
    if largest >= MAX_VOCABULARY:
        raise DataError(
            f"data.tokenizer: {file} has a token of id {largest:,}; a vocabulary has at most {MAX_VOCABULARY:,} ids, "
            "because a model has a row for each"
        )
    config = _read_config(file.with_name(CONFIG_FILE))
    end = _end_of_text(backend, config, end_of_text, file)
    return TextTokenizer(
        backend, end, f"{file.name} of {backend.get_vocab_size()} tokens", config | {"eos_token": end}, _beside(file)
    )


def read_tokenizer(file: Path) -> tokenizers.Tokenizer:
    """Read a ``tokenizer.json`` after checking that its steps cannot make a short text very long.

    Raises:
        DataError: the file cannot be read, or is no valid and bounded tokenizer.
    """
    try:
        content = read_regular(file, links="near")
        check_tokenizer(parse_json(content))  # the library's parser does not limit nesting
        return tokenizers.Tokenizer.from_buffer(content)
    except OSError as error:
        raise _unreadable(file, error) from error
    except BaseException as error:  # the library raises Exception or PanicException
        if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
            raise
        raise DataError(
            f"data.tokenizer: {file} is not a tokenizer ({error}); give a tokenizer.json in the format of Hugging Face "
            "tokenizers, 'bytes', or {bpe: 2048} to train one"
        ) from error


def _beside(file: Path) -> dict[str, bytes]:
    found = [other for name in BESIDE if (other := file.with_name(name)).is_file()]
    try:
        return {other.name: read_regular(other, links="near") for other in found}
    except OSError as error:
        raise _unreadable(file.parent, error) from error


def _unreadable(file: Path, error: OSError) -> DataError:
    return DataError(f"data.tokenizer: cannot read {file}: {error.strerror or error}; make it readable")


def _read_config(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        config = parse_json(read_regular(file, links="near"))
    except OSError as error:
        raise _unreadable(file, error) from error
    except ValueError as error:
        raise DataError(f"data.tokenizer: {file} is not JSON ({error}); repair it or move it away") from error
    if not isinstance(config, dict):
        raise DataError(f"data.tokenizer: {file} holds no JSON object; repair it or move it away")
    return config


def _end_of_text(backend: tokenizers.Tokenizer, config: dict[str, Any], wanted: str | None, file: Path) -> str:
    configured = config.get("eos_token")
    if isinstance(configured, dict):  # an added token with its settings
        configured = configured.get("content")
    candidates = [wanted] if wanted else [configured, *_KNOWN_ENDS]
    for token in candidates:
        if isinstance(token, str) and backend.token_to_id(token) is not None:
            return token
    special = [token.content for token in backend.get_added_tokens_decoder().values()]
    offer = f"its special tokens: {', '.join(special[:8])}" if special else "it has no special tokens"
    if wanted:
        raise DataError(f"data.end_of_text: {file} has no token {wanted!r}; {offer}")
    raise DataError(f"data.end_of_text: {file} does not name the token that ends a text; set it ({offer})")
