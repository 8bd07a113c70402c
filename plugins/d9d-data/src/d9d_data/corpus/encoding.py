"""Encoding that a dataset's config asks for: what becomes of its records, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from d9d_core.plugin import Ref

from d9d_data.config import (
    BpeTokenizer,
    ChatConfig,
    LabelledConfig,
    ModelTextConfig,
    PairsConfig,
    PreferenceConfig,
    PreparedConfig,
    TokenizedConfig,
)

#: Encoders by name. They are imported when they are used: some bring Jinja, which texts never need.
ENCODERS = {
    "text": Ref("d9d_data.corpus.encoder:TextEncoder"),
    "chat": Ref("d9d_data.chat.encoder:ChatEncoder"),
    "preference": Ref("d9d_data.chat.preference:PreferenceEncoder"),
    "labelled": Ref("d9d_data.fields.labelled:LabelledEncoder"),
    "pairs": Ref("d9d_data.fields.pairs:PairsEncoder"),
}


@dataclass(frozen=True, slots=True)
class Encoding:
    """Encoding of records.

    Attributes:
        encoder: name of the encoder, see :data:`ENCODERS`.
        settings: of the encoder, see its ``load``; plain data.
        columns: names of the values that it gives beside the tokens.
        texts: names of the documents of a sample, if it has several.
        plural: name of the records in notes, if they are no documents.
        targets: whether the tokens are predicted, so that the last of a document has no position.
    """

    encoder: str
    settings: dict[str, Any]
    columns: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    plural: str = "documents"
    targets: bool = True


#: Encoding of texts.
TEXTS = Encoding("text", {})


def tokenizer_of(config: PreparedConfig) -> tuple[str | BpeTokenizer, str | None]:
    """Choice of the tokenizer, which is resolved, and the end-of-text token if the config names one."""
    assert isinstance(config, TokenizedConfig | ModelTextConfig)
    assert config.tokenizer is not None
    return config.tokenizer, config.end_of_text if isinstance(config, TokenizedConfig) else None


def encoding_of(config: PreparedConfig) -> Encoding:
    """Encoding of a config's records."""
    if isinstance(config, LabelledConfig):
        return Encoding("labelled", _labelled(config), ("labels",), plural="labelled records", targets=False)
    if isinstance(config, PairsConfig):
        negatives = ["negative"] if config.negatives == 1 else [f"negative {n + 1}" for n in range(config.negatives)]
        texts = ("query", "positive", *negatives)
        return Encoding("pairs", _pairs(config), texts=texts, plural="pairs", targets=False)
    if not isinstance(config, ModelTextConfig):
        return TEXTS
    settings = {
        "arguments": config.template_arguments,
        "longest": config.sequence_length + 1,
        "too_long": config.too_long,
    }
    if isinstance(config, ChatConfig):
        return Encoding("chat", {**settings, "loss": config.loss}, ("weights",), plural="conversations")
    assert isinstance(config, PreferenceConfig)
    return Encoding("preference", settings, ("weights",), ("chosen", "rejected"), "pairs")


def _labelled(config: LabelledConfig) -> dict[str, Any]:
    return {
        "per": config.per,
        "field": config.text_field,
        "pair": config.pair,
        "label": config.label,
        "names": config.labels,
        "longest": config.sequence_length,
    }


def _pairs(config: PairsConfig) -> dict[str, Any]:
    names = ("query", "positive", "negative", "negatives", "query_prefix", "document_prefix")
    return {**{name: getattr(config, name) for name in names}, "longest": config.sequence_length}
