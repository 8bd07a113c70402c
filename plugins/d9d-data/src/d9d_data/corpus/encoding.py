"""Choice of the encoder for a dataset's records, and its settings as plain data, which worker processes receive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from d9d_core.data import TextInputs
from d9d_core.errors import DataError
from d9d_core.plugin import Ref

from d9d_data.config import (
    BpeTokenizer,
    ChatConfig,
    DocumentsConfig,
    LabelledConfig,
    MessageFormat,
    ModelTextConfig,
    PaddedConfig,
    PairsConfig,
    PreferenceConfig,
    PreparedConfig,
    TokenizedConfig,
    TokensConfig,
)
from d9d_data.corpus.fit import DOCUMENTS, Limit, Words

#: Encoders by name, imported on first use, because a dataset needs only one of them.
ENCODERS = {
    "text": Ref("d9d_data.corpus.encoder:TextEncoder"),
    "chat": Ref("d9d_data.chat.encoder:ChatEncoder"),
    "preference": Ref("d9d_data.chat.preference:PreferenceEncoder"),
    "labelled": Ref("d9d_data.fields.labelled:LabelledEncoder"),
    "tokens": Ref("d9d_data.fields.tokens:TokensEncoder"),
    "pairs": Ref("d9d_data.fields.pairs:PairsEncoder"),
}


@dataclass(frozen=True, slots=True)
class Encoding:
    """Encoding of a corpus: the encoder that turns records into tokens, and its settings.

    Attributes:
        encoder: name of the encoder, see :data:`ENCODERS`.
        settings: settings of the encoder's ``load``, as plain data.
        columns: names of the columns of values per token.
        texts: names of the documents of a sample, if a sample has several documents.
        words: nouns for the records in messages, such as "conversations".
        targets: whether tokens are predicted; the last token of a document is then only a target, not an input.
    """

    encoder: str
    settings: dict[str, Any]
    columns: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    words: Words = DOCUMENTS
    targets: bool = True

    @property
    def plural(self) -> str:
        """Name of the records in messages, in the plural."""
        return self.words.plural


#: Encoding of texts.
TEXTS = Encoding("text", {})


def tokenizer_of(config: PreparedConfig) -> tuple[str | BpeTokenizer, str | None]:
    """Tokenizer and end-of-text token (``None`` if unset) of a config whose tokenizer is resolved."""
    assert isinstance(config, TokenizedConfig | ModelTextConfig)
    assert config.tokenizer is not None
    return config.tokenizer, config.end_of_text if isinstance(config, TokenizedConfig) else None


def encoding_of(config: PreparedConfig) -> Encoding:
    """Choose the encoding for the corpus of a dataset config."""
    if isinstance(config, LabelledConfig):
        lost = "words lost their labels" if config.per == "word" else ""
        words = Words("labelled records", lost)
        return Encoding("labelled", _labelled(config), ("labels",), words=words, targets=False)
    if isinstance(config, PairsConfig):
        negatives = ["negative"] if config.negatives == 1 else [f"negative {n + 1}" for n in range(config.negatives)]
        texts = ("query", "positive", *negatives)
        return Encoding("pairs", _pairs(config), texts=texts, words=Words("pairs"), targets=False)
    if isinstance(config, TokensConfig):
        return Encoding("tokens", _tokens(config), ("weights",), words=Words("records", "tokens to learn are lost"))
    if isinstance(config, DocumentsConfig) and config.too_long != "cut_end":
        # With cut_end, documents are stored whole and the stream cuts them, so that jobs with any sequence_length, and
        # the dataset text, use the same cache entry.
        return Encoding("text", {"longest": config.sequence_length + 1, "too_long": config.too_long})
    if not isinstance(config, ModelTextConfig):
        return TEXTS
    assert isinstance(config, ChatConfig | PreferenceConfig)
    settings = {
        "format": config.format.model_dump() if isinstance(config.format, MessageFormat) else config.format,
        "arguments": config.template_arguments,
        "tool_arguments": config.tool_arguments,
        "longest": config.sequence_length + 1,
        "too_long": config.too_long,
    }
    if isinstance(config, ChatConfig):
        side = "first" if config.too_long == "cut_start" else "last"
        words = Words("conversations", f"the {side} answer is incomplete" if config.loss != "all" else "")
        return Encoding("chat", {**settings, "loss": config.loss}, ("weights",), words=words)
    words = Words("pairs", "a completion is incomplete")
    return Encoding("preference", settings, ("weights",), ("chosen", "rejected"), words)


def limit_of(config: PreparedConfig) -> Limit | None:
    """Token limit of a text; ``None`` for datasets that take texts of any length."""
    if not isinstance(config, PaddedConfig):
        return None
    return Limit(config.sequence_length + int(encoding_of(config).targets), config.too_long)


def no_inputs_of(encoding: Encoding, inputs: TextInputs, adds_end: bool) -> int:
    """Number of tokens at the end of each document that are not inputs.

    Args:
        encoding: encoding of the records.
        inputs: which tokens of a text the model gets as inputs, see :data:`~d9d_core.data.TextInputs`.
        adds_end: whether the tokenizer itself adds the end of text.

    Raises:
        DataError: ``inputs`` asks for an end-of-text token as an input, and the texts have none.
    """
    if inputs == "with_end":
        if encoding.encoder == "labelled" and not adds_end:
            raise DataError(
                "data: the head is trained with texts that end with the end-of-text token, but texts with labels have "
                "none, so the head would read other inputs for the same text; use the dataset documents or pairs"
            )
        return 0
    if inputs == "own":
        return int(encoding.targets)
    if encoding.encoder == "labelled":
        return int(inputs == "without_end" and adds_end)
    if encoding.encoder in ("text", "pairs"):
        return 1 if inputs == "without_end" else int(not adds_end)
    return int(encoding.targets)


#: Value of ``inputs``, the input tokens with which a head was trained -> encoders that truncate as its training did.
_CUT_ALIKE = {
    "with_end": ("text", "pairs"),
    "as_encoded": ("text", "labelled"),
    "without_end": ("text", "chat", "preference"),
}


def check_cut(encoding: Encoding, inputs: TextInputs, limit: Limit | None, cut: int) -> None:
    """Raise if this dataset truncates texts in another way than the dataset with which a head was trained.

    Raises:
        DataError: some texts are truncated, and the two ways differ.
    """
    if inputs == "own" or not cut:
        return
    # Labelled texts keep the token that the tokenizer adds at the beginning, even if their beginning is cut.
    loses_beginning = encoding.encoder == "text" and limit is not None and limit.too_long == "cut_start"
    if encoding.encoder in _CUT_ALIKE[inputs] and not (inputs == "as_encoded" and loses_beginning):
        return
    raise DataError(
        f"data.sequence_length: {cut:,} {encoding.plural} are too long; this dataset and the one that the "
        "head is trained with truncate them in different ways; raise data.sequence_length, or use the head's dataset"
    )


def _labelled(config: LabelledConfig) -> dict[str, Any]:
    return {
        "per": config.per,
        "field": config.text_field,
        "pair": config.pair,
        "label": config.label,
        "names": config.labels,
        "longest": config.sequence_length,
        "too_long": config.too_long,
    }


def _tokens(config: TokensConfig) -> dict[str, Any]:
    fields = {name: getattr(config, name) for name in ("ids", "labels", "mask", "too_long")}
    return {**fields, "longest": config.sequence_length + 1}


def _pairs(config: PairsConfig) -> dict[str, Any]:
    names = ("query", "positive", "negative", "negatives", "query_prefix", "document_prefix")
    return {
        **{name: getattr(config, name) for name in names},
        "longest": config.sequence_length,
        "too_long": config.too_long,
    }
