"""Steps of a ``tokenizer.json`` that would make gigabytes of a short text are refused; steps of real files are not."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from d9d_testing.hostile.strangers import TOKENIZERS
from d9d_weights.hugging_face import tokenizer_bounds
from d9d_weights.hugging_face.tokenizer_bounds import check_tokenizer


def table(*replacements: bytes) -> dict[str, Any]:
    """Normalizer of SentencePiece: the size of a trie, the trie, and texts that end with a zero."""
    content = (8).to_bytes(4, "little") + bytes(8) + b"".join(text + b"\0" for text in replacements)
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(content).decode()}


def replacing(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def template(pieces: int, ids: int) -> dict[str, Any]:
    special = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [special] * pieces + [{"Sequence": {"id": "A", "type_id": 0}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [0] * ids, "tokens": ["<s>"] * ids}},
    }


#: Refused part -> a ``tokenizer.json``.
REFUSED = {
    "turns one character into": TOKENIZERS["a normalizer that multiplies"],
    "'prepend' of 50,000,000 characters": TOKENIZERS["a normalizer that prepends"],
    "normalizer turns one character into": {"normalizer": replacing({"Regex": ""}, "e" * 100)},
    "decoder turns one character into": {
        "decoder": {"type": "Sequence", "decoders": [replacing({"String": ""}, "ee")] * 9}
    },
    "1,001 steps": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Digits"}] * 1000}},
    "replaces a text by 1,000 bytes": {"normalizer": table(b"a", b"e" * 1000)},
    "not base64": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "!"}},
    "adds 1,000,001 tokens": {"post_processor": template(1_000_000, 1)},
    "adds 100,001 tokens": {"post_processor": template(100, 1000)},
    "'continuing_subword_prefix' of": {"model": {"type": "BPE", "continuing_subword_prefix": "e" * 10**6}},
}


@pytest.mark.thorough
@pytest.mark.parametrize("says", REFUSED)
def test_steps_that_make_much_of_a_short_text_are_refused(says: str) -> None:
    with pytest.raises(ValueError, match=says):
        check_tokenizer(REFUSED[says])


SOUND: dict[str, Any] = {
    "Llama": {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [{"type": "Prepend", "prepend": "▁"}, replacing({"String": " "}, "▁")],
        },
        "post_processor": template(1, 1),
        "decoder": {"type": "Sequence", "decoders": [replacing({"String": "▁"}, " "), {"type": "ByteFallback"}]},
    },
    "T5": {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [table("صلى الله عليه وسلم".encode()), replacing({"Regex": " {2,}"}, "▁")],
        }
    },
    "Qwen": {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(?i:'s|'t)|[^\\r\\n]?\\p{L}+" * 20}}},
    "none": {"normalizer": None, "pre_tokenizer": None, "post_processor": None, "model": {"type": "BPE"}},
    "odd": {"normalizer": [], "decoder": {"decoders": 3, "pattern": 3, "content": "x"}, "model": 3},
    "odd pattern": {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": 3, "String": None}}},
}


@pytest.mark.parametrize("name", SOUND)
def test_steps_of_real_tokenizers_are_not_refused(name: str) -> None:
    check_tokenizer(SOUND[name])


def growing(*contents: tuple[str, str]) -> dict[str, Any]:
    """Decoder that replaces texts by others."""
    return {"decoder": {"type": "Sequence", "decoders": [replacing({"String": a}, b) for a, b in contents]}}


def pieces(single: int, pair: int) -> dict[str, Any]:
    """Post-processor that adds one token for each piece."""
    one = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    return {"post_processor": {"type": "TemplateProcessing", "single": [one] * single, "pair": [one] * pair}}


def split(*patterns: str) -> dict[str, Any]:
    names = ("String", "Regex")
    return {"pre_tokenizer": {"type": "Split", "pattern": dict(zip(names, patterns, strict=False))}}


@pytest.mark.parametrize(
    ("allowed", "refused", "says"),
    [
        (
            growing(("a", "e" * 64)),
            growing(("a", "e" * 65)),
            "decoder turns one character into 65 characters, more than 64",
        ),
        # A step that shortens a text does not make up for one that lengthens it.
        (
            growing(("aa", "a"), ("a", "e" * 64)),
            growing(("aaaa", "a"), ("a", "e" * 65)),
            "decoder turns one character into 65 characters",
        ),
        (
            growing(("ab", "e" * 16), ("a", "e" * 8)),
            growing(("ab", "e" * 18), ("a", "e" * 8)),
            "decoder turns one character into 72 char",
        ),
        (
            {"decoder": replacing({"Regex": "a"}, "e" * 63)},
            {"decoder": replacing({"Regex": "a"}, "e" * 64)},
            "turns one character into 65",
        ),
        (pieces(1024, 3), pieces(1025, 3), "post_processor adds 1,025 tokens to a text, more than 1,024"),
        (pieces(3, 1024), pieces(3, 1025), "post_processor adds 1,025 tokens to a text, more than 1,024"),
        (
            split("e" * 65536, "e"),
            split("e" * 65537, "e"),
            "pre_tokenizer has a pattern of 65,537 characters, more than",
        ),
        (
            split("e", "e" * 65536),
            split("e", "e" * 65537),
            "pre_tokenizer has a pattern of 65,537 characters, more than",
        ),
        ({"model": {"unk_token": "e" * 256}}, {"model": {"unk_token": "e" * 257}}, "model has a 'unk_token' of 257"),
        (
            {"normalizer": table(b"e" * 256, b"a")},
            {"normalizer": table(b"e" * 257, b"a")},
            "replaces a text by 257 bytes",
        ),
        (
            {"pre_tokenizer": {"pretokenizers": [{"type": "Digits"}] * 127}},
            {"pre_tokenizer": {"pretokenizers": [{"type": "Digits"}] * 128}},
            "pre_tokenizer has 129 steps, more than 128",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_limit_allows_its_number_and_no_more(allowed: dict[str, Any], refused: dict[str, Any], says: str) -> None:
    check_tokenizer(allowed)
    with pytest.raises(ValueError, match=says):
        check_tokenizer(refused)


def test_a_table_of_replacements_has_a_largest_size(monkeypatch: pytest.MonkeyPatch) -> None:
    step = table(b"abc")
    size = len(step["precompiled_charsmap"])
    monkeypatch.setattr(tokenizer_bounds, "_MOST_TABLE", size // 2)
    check_tokenizer({"normalizer": step})
    monkeypatch.setattr(tokenizer_bounds, "_MOST_TABLE", size // 2 - 1)
    with pytest.raises(ValueError, match=f"normalizer has a table of {size} characters, more than {size - 2}"):
        check_tokenizer({"normalizer": step})
