"""Bounds on the text replacements in an untrusted ``tokenizer.json``, so that a short text cannot become gigabytes.

The library ``tokenizers`` replaces and adds text as the file states, without limits on its size. It limits only the
time of regular expressions.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["check_tokenizer"]

#: Sections whose steps change or add text or tokens.
_PROGRAMS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
#: Limits of a section: number of steps, and number of tokens that it adds to a text.
_MOST_STEPS, _MOST_ADDED = 128, 1024
#: Limits in characters: a text that a step adds, and a pattern that a step searches.
_LONGEST_TEXT, _LONGEST_PATTERN = 256, 1 << 16
#: Limit of the number of characters that all replacements of a section together make of one character.
_MOST_GROWTH = 64
#: Limits of a SentencePiece normalizer: its table of replacements may have 2 * _MOST_TABLE base64 characters (6 MiB
#: decoded), and each replacement in the table _LONGEST_REPLACEMENT bytes.
_MOST_TABLE, _LONGEST_REPLACEMENT = 1 << 22, 256


def check_tokenizer(value: Any) -> None:
    """Refuse a ``tokenizer.json`` whose steps could make a short text very long.

    Args:
        value: parsed JSON of bounded depth.

    Raises:
        ValueError: the file has such steps.
    """
    for section in _PROGRAMS:
        steps = list(_steps(value.get(section))) if isinstance(value, Mapping) else []
        if len(steps) > _MOST_STEPS:
            raise ValueError(f"the tokenizer's {section} has {len(steps):,} steps, more than {_MOST_STEPS}")
        growth = 1.0
        for step in steps:
            growth *= _growth(step, section)
            _check_lengths(step, section)
        if growth > _MOST_GROWTH:
            raise ValueError(
                f"the tokenizer's {section} turns one character into {growth:,.0f} characters, more than {_MOST_GROWTH}"
            )
    model = value.get("model") if isinstance(value, Mapping) else None
    if isinstance(model, Mapping):
        _check_lengths({name: text for name, text in model.items() if isinstance(text, str)}, "model")


def _steps(value: Any) -> Iterator[Mapping[str, Any]]:
    """All steps of a section of ``tokenizer.json``, including nested steps."""
    if isinstance(value, Mapping):
        yield value
        for name in ("normalizers", "pretokenizers", "processors", "decoders"):
            inner = value.get(name)
            for step in inner if isinstance(inner, list) else ():
                yield from _steps(step)


def _growth(step: Mapping[str, Any], section: str) -> float:
    """Maximum number of characters by which a step replaces one character."""
    if step.get("type") == "Precompiled":
        _check_table(step.get("precompiled_charsmap"), section)
    pattern, content = step.get("pattern"), step.get("content")
    if not isinstance(content, str):
        return 1.0
    literal = pattern.get("String") if isinstance(pattern, Mapping) else None
    # A regular expression, or an empty text, may match between any two characters.
    return max(1.0, len(content) / len(literal)) if isinstance(literal, str) and literal else 1.0 + len(content)


def _check_lengths(step: Mapping[str, Any], section: str) -> None:
    added = 0
    for name, value in step.items():
        if isinstance(value, str) and name != "precompiled_charsmap" and len(value) > _LONGEST_TEXT:
            raise ValueError(
                f"the tokenizer's {section} has a {name!r} of {len(value):,} characters, more than {_LONGEST_TEXT}"
            )
        if name == "pattern" and isinstance(value, Mapping):
            longest = max((len(text) for text in value.values() if isinstance(text, str)), default=0)
            if longest > _LONGEST_PATTERN:
                raise ValueError(
                    f"the tokenizer's {section} has a pattern of {longest:,} characters, more than {_LONGEST_PATTERN:,}"
                )
        if name in ("single", "pair") and isinstance(value, list):
            ids = [_ids_of(step, piece) for piece in value]
            added = max(added, sum(ids))
    if added > _MOST_ADDED:
        raise ValueError(f"the tokenizer's {section} adds {added:,} tokens to a text, more than {_MOST_ADDED:,}")


def _ids_of(step: Mapping[str, Any], piece: Any) -> int:
    """Number of tokens that a part of a template adds; 1 if unknown."""
    special = piece.get("SpecialToken") if isinstance(piece, Mapping) else None
    known = step.get("special_tokens")
    name = special.get("id") if isinstance(special, Mapping) else None
    token = known.get(name) if isinstance(known, Mapping) and isinstance(name, str) else None
    ids = token.get("ids") if isinstance(token, Mapping) else None
    return len(ids) if isinstance(ids, list) else 1


def _check_table(text: Any, section: str) -> None:
    """Refuse a SentencePiece normalizer's table of replacements that is too large, or has a too long replacement.

    The table is base64 of the trie's size (4 bytes), the trie, and the zero-terminated replacements.
    """
    if not isinstance(text, str):
        return
    if len(text) > 2 * _MOST_TABLE:
        raise ValueError(
            f"the tokenizer's {section} has a table of {len(text):,} characters, more than {2 * _MOST_TABLE:,}"
        )
    try:
        table = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"the tokenizer's {section} has a table that is not base64: {error}") from error
    begin = 4 + int.from_bytes(table[:4], "little")
    longest = max(map(len, table[begin:].split(b"\0")))
    if longest > _LONGEST_REPLACEMENT:
        raise ValueError(
            f"the tokenizer's {section} replaces a text by {longest:,} bytes, more than {_LONGEST_REPLACEMENT}"
        )
