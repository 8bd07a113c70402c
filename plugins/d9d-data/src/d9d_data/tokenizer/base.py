"""Base class of tokenizers: token ids of texts, and the files to copy into an exported model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import tokenizers
from d9d_core.errors import D9dError, DataError

#: Numbers of characters: length above which a text is encoded in pieces or refused, length of a piece, and how many
#: characters before its end are searched for a space at which to cut.
_LONG, _PIECE, _WINDOW = 1 << 22, 1 << 18, 1 << 12
#: Number of pieces encoded in one call.
_PIECES = 8
Ids = npt.NDArray[np.integer[Any]]
#: Names of the main files of a Hugging Face tokenizer.
CONFIG_FILE, TOKENIZER_FILE = "tokenizer_config.json", "tokenizer.json"
#: Further files, which are copied unchanged.
BESIDE = ("chat_template.jinja", "special_tokens_map.json", "added_tokens.json")


class TextTokenizer:
    """Base class for tokenizers of texts.

    Args:
        backend: tokenizer of the library ``tokenizers``.
        end_of_text: token that ends documents; part of the vocabulary.
        description: description of the tokenizer for messages.
        config: contents of ``tokenizer_config.json``.
        beside: contents of further files to copy into an exported model, by file name.

    Raises:
        ValueError: ``end_of_text`` is not in the vocabulary.
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
        #: Whether special tokens spelled in texts are encoded as special tokens; otherwise as ordinary text.
        self.recognises_special_tokens = False
        added = backend.get_added_tokens_decoder().values()
        #: Texts of the special tokens, longest first.
        self.specials = tuple(sorted((token.content for token in added if token.special), key=len, reverse=True))
        self._spelled = re.compile("|".join(map(re.escape, self.specials)) or r"(?!)")
        self._beside = dict(beside or {})
        self._config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "eos_token": end_of_text,
        } | (config or {})
        self.description = description
        end_of_text_id = backend.token_to_id(end_of_text)
        if end_of_text_id is None:
            raise ValueError(f"the tokenizer has no token {end_of_text!r}; give an end_of_text from its vocabulary")
        self.end_of_text_id, self.end_of_text = end_of_text_id, end_of_text
        #: Largest id plus 1; ids may have gaps.
        self.vocab_size: int = max(backend.get_vocab(with_added_tokens=True).values()) + 1

    def recognise_special_tokens(self) -> None:
        """Encode special tokens spelled in texts as special tokens from now on."""
        self.recognises_special_tokens, self._backend.encode_special_tokens = True, False

    @property
    def quoted(self) -> Literal["text", "token"]:
        """Encoding of special tokens spelled in texts: ``text`` as ordinary text, ``token`` as the special token."""
        return "token" if self.recognises_special_tokens else "text"

    def spelled(self, texts: Iterable[str]) -> str:
        """First special token that one of the texts spells; empty if no text spells a special token."""
        return next((found.group() for text in texts if (found := self._spelled.search(text))), "")

    def id_of(self, token: str) -> int | None:
        """Id of a token; ``None`` if there is no such token."""
        number: int | None = self._backend.token_to_id(token)
        return number

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """Token ids of each text with the tokenizer's special tokens, as ``tokenizer(text)`` in transformers.

        If special tokens are recognised, a token that the text already begins or ends with is not added again.
        """
        recognises = self.recognises_special_tokens
        if any(len(text) > _LONG for text in texts):
            return [self._encode_long(text) if len(text) > _LONG else self.encode([text])[0] for text in texts]
        with panics_refused():
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=not recognises)
        found: list[Ids] = [np.asarray(encoding.ids, dtype=np.int64) for encoding in encodings]
        if not recognises:
            return found
        first, last = self._added
        return [_once(first, _once(last, ids, at_end=True)) for ids in found]

    def _encode_long(self, text: str) -> Ids:
        """Token ids of a text encoded in pieces, because the library takes 170 bytes of memory per token."""
        parts = _pieces(text)
        with panics_refused():
            pieces = [
                np.asarray(encoding.ids, dtype=np.int32)
                for some in iter(lambda: list(islice(parts, _PIECES)), [])
                for encoding in self._backend.encode_batch_fast(some, add_special_tokens=False)
            ]
        first, last = self._added
        if self.recognises_special_tokens:
            return _once(first, _once(last, np.concatenate(pieces), at_end=True))
        return np.concatenate([first.astype(np.int32), *pieces, last.astype(np.int32)])

    def ended(self, ids: Ids) -> Ids:
        """Token ids of a text with the end-of-text token, added unless the ids end with it already."""
        return ids if len(ids) and ids[-1] == self.end_of_text_id else np.append(ids, self.end_of_text_id)

    @property
    def adds_after(self) -> int:
        """Number of tokens that the tokenizer itself adds after a text."""
        return len(self._added[1])

    @property
    def adds_end(self) -> bool:
        """Whether the tokenizer itself adds the end-of-text token to a text."""
        return bool(np.any(self._added[1][-1:] == self.end_of_text_id))

    @cached_property
    def _added(self) -> tuple[Ids, Ids]:
        """Token ids that the tokenizer adds before and after a text."""
        whole, plain = (self._backend.encode("a", add_special_tokens=adds).ids for adds in (True, False))
        count = len(whole) - len(plain)
        before = next(place for place in range(count + 1) if whole[place : place + len(plain)] == plain)
        return np.asarray(whole[:before], dtype=np.int64), np.asarray(whole[before + len(plain) :], dtype=np.int64)

    def vocabulary(self) -> dict[str, int]:
        """Ids of all tokens, in the order of the ids."""
        return dict(sorted(self._backend.get_vocab(with_added_tokens=True).items(), key=lambda item: item[1]))

    def serialised(self) -> str:
        """Content of the ``tokenizer.json``."""
        return str(self._backend.to_str(pretty=True))

    def save(self, directory: Path) -> None:
        """Write the files that ``transformers.AutoTokenizer.from_pretrained(directory)`` reads."""
        directory.mkdir(parents=True, exist_ok=True)
        # The library's own function raises plain exceptions if the disk is full.
        (directory / TOKENIZER_FILE).write_text(self.serialised(), encoding="utf-8")
        text = json.dumps(self._config, indent=2, ensure_ascii=False) + "\n"
        (directory / CONFIG_FILE).write_text(text, encoding="utf-8")
        for name, content in self._beside.items():
            (directory / name).write_bytes(content)


def _pieces(text: str) -> Iterator[str]:
    """Yield pieces of a text, cut before a space between two words if possible, because tokens mostly start there."""
    begin = 0
    while len(text) - begin > _PIECE + 1:
        end = begin + _PIECE
        spaces = (at for at in range(end, end - _WINDOW, -1) if text[at] == " ")
        found = next((at for at in spaces if text[at - 1].isalnum() and text[at + 1].isalnum()), end)
        yield text[begin:found]
        begin = found
    yield text[begin:]


@contextmanager
def panics_refused(*texts: str | None) -> Iterator[None]:
    """Context in which any error of the tokenizer's library, including panics, becomes a ``DataError``.

    Args:
        texts: texts that the library encodes as a whole.

    Raises:
        DataError: the library raised, or a text is so long that encoding it would fill the memory; the caller adds the
            record's location before the message.
    """
    longest = max((len(text) for text in texts if text), default=0)
    if longest > _LONG:
        raise DataError(
            f"has a text of {longest:,} characters, more than {_LONG:,}, which must be tokenised as a whole; split the "
            "text, or leave the record out"
        )
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, D9dError):
        raise
    except BaseException as error:  # PanicException is not an Exception
        raise DataError(f"data.tokenizer: the tokenizer cannot encode a text: {error}; use another one") from error


def _once(added: Ids, ids: Ids, at_end: bool = False) -> Ids:
    """Token ids with the ids ``added`` before or after them, unless they already begin or end with these ids."""
    there = ids[len(ids) - len(added) :] if at_end else ids[: len(added)]
    if np.array_equal(there, added):
        return ids
    return np.concatenate([ids, added] if at_end else [added, ids])
