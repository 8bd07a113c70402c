"""Encoders by dataset, and datasets that would encode in another way than in training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from d9d_core.errors import DataError
from d9d_data.config import (
    ChatConfig,
    ChatFormat,
    DocumentsConfig,
    LabelledConfig,
    PairsConfig,
    TextConfig,
    TokensConfig,
)
from d9d_data.corpus import encoding
from d9d_data.corpus.encoding import Encoding, check_cut, encoding_of, limit_of, no_inputs_of
from d9d_data.corpus.fit import DOCUMENTS, Limit, Words

# --- choices of encoders

GIVEN: Any = {"sources": ("a.jsonl",), "sequence_length": 8}


@pytest.mark.parametrize(
    ("config", "found", "longest"),
    [
        (TextConfig(**GIVEN), Encoding("text", {}), None),
        (DocumentsConfig(**GIVEN), Encoding("text", {}), 9),
        (
            DocumentsConfig(**GIVEN, too_long="drop"),
            Encoding("text", {"longest": 9, "too_long": "drop"}),
            9,
        ),
        (
            TokensConfig(**GIVEN, mask="m"),
            Encoding(
                "tokens",
                {"ids": "input_ids", "labels": None, "mask": "m", "too_long": "cut_end", "longest": 9},
                ("weights",),
                words=Words("records", "tokens to learn are lost"),
            ),
            9,
        ),
        (
            LabelledConfig(**GIVEN, pair="p"),
            Encoding(
                "labelled",
                {
                    "per": "text", "field": "text", "pair": "p", "label": None, "names": None, "longest": 8,
                    "too_long": "cut_end",
                },
                ("labels",), words=Words("labelled records"), targets=False,
            ),
            8,
        ),
        (
            LabelledConfig(**GIVEN, per="word", labels=("a", "b")),
            Encoding(
                "labelled",
                {
                    "per": "word", "field": "tokens", "pair": None, "label": None, "names": ("a", "b"), "longest": 8,
                    "too_long": "cut_end",
                },
                ("labels",), words=Words("labelled records", "words lost their labels"), targets=False,
            ),
            8,
        ),
        (
            PairsConfig(**GIVEN, negatives=1, query_prefix="q"),
            Encoding(
                "pairs",
                {
                    "query": "query", "positive": "positive", "negative": None, "negatives": 1, "query_prefix": "q",
                    "document_prefix": "", "longest": 8, "too_long": "cut_end",
                },
                texts=("query", "positive", "negative"), words=Words("pairs"), targets=False,
            ),
            8,
        ),
        (
            ChatConfig(**GIVEN, too_long="cut_start", format="alpaca"),
            Encoding(
                "chat",
                {
                    "format": "alpaca", "arguments": {}, "tool_arguments": "parse", "longest": 9,
                    "too_long": "cut_start", "loss": "assistant",
                },
                ("weights",), words=Words("conversations", "the first answer is incomplete"),
            ),
            9,
        ),
    ],
)  # fmt: skip
def test_every_dataset_has_its_encoding(config: Any, found: Encoding, longest: int | None) -> None:
    assert encoding_of(config) == found
    limit = limit_of(config)
    assert limit == (None if longest is None else Limit(longest, config.too_long))


def test_negatives_are_numbered_and_named_fields_are_plain_data() -> None:
    assert encoding_of(PairsConfig(**GIVEN, negatives=2)).texts == ("query", "positive", "negative 1", "negative 2")
    assert encoding_of(PairsConfig(**GIVEN)).texts == ("query", "positive")
    mapped = encoding_of(ChatConfig(**GIVEN, loss="all", format=ChatFormat(user="q", assistant="a")))
    assert mapped.words == Words("conversations")
    assert mapped.settings["format"] == ChatFormat(user="q", assistant="a").model_dump()
    assert (Encoding("text", {}).words, Encoding("text", {}).targets) == (DOCUMENTS, True)


@pytest.mark.parametrize(
    ("encoder", "adds_end", "counts"),
    [
        # own, with_end, without_end, as_encoded
        ("text", False, (1, 0, 1, 1)), ("text", True, (1, 0, 1, 0)), ("pairs", False, (0, 0, 1, 1)),
        ("pairs", True, (0, 0, 1, 0)), ("labelled", False, (0, None, 0, 0)), ("labelled", True, (0, 0, 1, 0)),
        ("chat", False, (1, 0, 1, 1)), ("chat", True, (1, 0, 1, 1)),
    ],
)  # fmt: skip
def test_ends_of_texts_are_inputs_where_the_head_is_trained_with_them(
    encoder: str, adds_end: bool, counts: Sequence[int | None]
) -> None:
    own = Encoding(encoder, {}, targets=encoder in ("text", "chat"))
    for inputs, count in zip(("own", "with_end", "without_end", "as_encoded"), counts, strict=True):
        given: Any = inputs
        if count is None:
            with pytest.raises(DataError, match="texts with labels have none, so the head would read other inputs"):
                no_inputs_of(own, given, adds_end)
        else:
            assert no_inputs_of(own, given, adds_end) == count


@pytest.mark.parametrize(
    ("inputs", "alike"),
    [
        ("own", {"text", "pairs", "labelled", "chat", "preference", "tokens"}), ("with_end", {"text", "pairs"}),
        ("as_encoded", {"text", "labelled"}), ("without_end", {"text", "chat", "preference"}),
    ],
)  # fmt: skip
def test_datasets_that_cut_texts_in_another_way_than_in_training_are_refused(inputs: Any, alike: set[str]) -> None:
    for encoder in encoding.ENCODERS:
        own = Encoding(encoder, {}, words=Words("records"))
        check_cut(own, inputs, Limit(8), 0)
        if encoder in alike:
            check_cut(own, inputs, Limit(8), 1200)
            check_cut(own, inputs, None, 1200)
        else:
            with pytest.raises(DataError, match=r"^data.sequence_length: 1,200 records are too long; this dataset and"):
                check_cut(own, inputs, Limit(8), 1200)
    start = Limit(8, "cut_start")
    check_cut(Encoding("labelled", {}), "as_encoded", start, 1)
    check_cut(Encoding("text", {}), "with_end", start, 1)
    with pytest.raises(DataError, match="truncate them in different ways"):
        check_cut(Encoding("text", {}), "as_encoded", start, 1)
