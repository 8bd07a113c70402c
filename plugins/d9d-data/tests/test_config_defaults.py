"""Defaults and limits of the fields of the datasets' configs."""

from __future__ import annotations

from typing import Any

import pytest
from d9d_data.config import (
    BpeTokenizer,
    ChatConfig,
    DocumentsConfig,
    LabelledConfig,
    PairsConfig,
    PreferenceConfig,
    TextConfig,
    TokensConfig,
)
from d9d_data.dataset.config import DatasetConfig
from d9d_data.mixture.config import MixturePart
from d9d_testing.toy.config import ToyDataConfig
from pydantic import BaseModel, ValidationError

GIVEN: dict[str, Any] = {"sources": ("a.jsonl",), "sequence_length": 8}
PREPARED = {
    "malformed": "error", "special_tokens": "text", "digest": "sampled", "split": "train", "held_out": 0.0,
    "shuffle": True, "workers": 0, "preparation_workers": None, "tokenizer": None,
}  # fmt: skip
PADDED = {"bucket_window": None, "pad_multiple": 8, "too_long": "cut_end"}
OF_MODEL = {"template_arguments": {}, "tool_arguments": "parse", "format": None}


@pytest.mark.parametrize(
    ("config", "defaults"),
    [
        (TextConfig, {"end_of_text": None, "field": None, "packing": "concat"}),
        (DocumentsConfig, {**PADDED, "end_of_text": None, "field": None}),
        (ChatConfig, {**PADDED, **OF_MODEL, "loss": "assistant", "packing": "none"}),
        (PreferenceConfig, {**PADDED, **OF_MODEL}),
        (
            TokensConfig,
            {**PADDED, "end_of_text": None, "ids": "input_ids", "labels": None, "mask": None, "packing": "none"},
        ),
        (
            LabelledConfig,
            {**PADDED, "end_of_text": None, "field": None, "per": "text", "pair": None, "label": None, "labels": None},
        ),
        (
            PairsConfig,
            {
                **PADDED, "end_of_text": None, "query": "query", "positive": "positive", "negatives": 0,
                "negative": None, "query_prefix": "", "document_prefix": "",
            },
        ),
    ],
)  # fmt: skip
def test_fields_have_their_documented_defaults(config: type[BaseModel], defaults: dict[str, Any]) -> None:
    fields = {name: field.default for name, field in config.model_fields.items() if not field.is_required()}
    del fields["name"]
    factories = {name: {} for name, field in config.model_fields.items() if field.default_factory is not None}
    assert fields | factories == PREPARED | defaults
    assert {name for name, field in config.model_fields.items() if field.is_required()} == {
        "sources",
        "sequence_length",
    }


def test_items_of_a_users_dataset_are_padded_on_the_right_and_shuffled() -> None:
    config = DatasetConfig(build="module:function")
    assert config.collate is None
    assert (config.arguments, config.padding, config.side, config.pad_multiple) == ({}, {}, "right", 1)
    assert (config.shuffle, config.bucket_window, config.workers) == (True, None, 0)


@pytest.mark.parametrize(
    ("config", "field", "allowed", "refused"),
    [
        (TextConfig, "sequence_length", (1,), (0,)),
        (TextConfig, "held_out", (0.0, 0.5), (-0.01, 0.51)),
        (TextConfig, "workers", (0,), (-1,)),
        (TextConfig, "preparation_workers", (0, 1024), (-1, 1025)),
        (TextConfig, "field", ("t",), ("",)),
        (TextConfig, "end_of_text", ("t",), ("",)),
        (PairsConfig, "sequence_length", (8,), (1,)),
        (PairsConfig, "negatives", (0, 1024), (-1, 1025)),
        (PairsConfig, "query", ("q",), ("",)),
        (DocumentsConfig, "bucket_window", (1,), (0,)),
        (DocumentsConfig, "pad_multiple", (1,), (0,)),
        (LabelledConfig, "labels", (("a", "b"),), (("a",),)),
    ],
)  # fmt: skip
def test_numbers_have_limits(
    config: type[BaseModel], field: str, allowed: tuple[Any, ...], refused: tuple[Any, ...]
) -> None:
    more = {"pad_multiple": 1} if "pad_multiple" in config.model_fields else {}
    for value in allowed:
        assert getattr(config.model_validate({**GIVEN, **more, field: value}), field) == value
    for value in refused:
        with pytest.raises(ValidationError, match=field):
            config.model_validate({**GIVEN, **more, field: value})


def test_parts_of_a_mixture_and_trained_tokenizers_have_limits() -> None:
    part = MixturePart(data=ToyDataConfig())
    assert (part.weight, part.epochs) == (1.0, None)
    for field in ("weight", "epochs"):
        assert getattr(MixturePart.model_validate({"data": ToyDataConfig(), field: 1e6}), field) == 1e6
        for wrong in (0, 1.1e6):
            with pytest.raises(ValidationError, match=field):
                MixturePart.model_validate({"data": ToyDataConfig(), field: wrong})
    for size in (257, 1 << 24):
        assert BpeTokenizer(bpe=size).bpe == size
    for size in (256, (1 << 24) + 1):
        with pytest.raises(ValidationError, match="bpe"):
            BpeTokenizer(bpe=size)
