"""Tokenizer of the pretrained model: the default, and the check that a configured tokenizer agrees with it."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from d9d_core.errors import DataError
from d9d_core.untrusted import Place

from d9d_data.config import BpeTokenizer, ModelTextConfig, PreparedConfig, TokenizedConfig, TokensConfig
from d9d_data.tokenizer.base import TOKENIZER_FILE
from d9d_data.tokenizer.select import make_tokenizer, tokenizer_identity

C = TypeVar("C", bound=ModelTextConfig | TokenizedConfig)
P = TypeVar("P", bound=PreparedConfig)
_NEEDED = "name the tokenizer that belongs to these weights in data.tokenizer"


def with_tokenizer(config: C, pretrained: str | None) -> C:
    """Return a dataset config that has a tokenizer: its own, or else the pretrained model's, or else ``bytes``.

    Args:
        config: config of a dataset.
        pretrained: directory, file or address of the pretrained weights, if any.

    Raises:
        DataError: neither the model nor the config has a tokenizer and ``bytes`` does not suffice, or the tokenizers of
            the model and the config differ.
    """
    own = _own(pretrained)
    if config.tokenizer is not None:
        if own is not None:
            _compare(config, own)
        return config
    if own is not None:
        return _taking(config, str(own))
    if pretrained is not None:
        raise DataError(f"data.tokenizer: there is no {TOKENIZER_FILE} next to the weights of {pretrained}; {_NEEDED}")
    if isinstance(config, ModelTextConfig):
        raise DataError(
            f"data.tokenizer: the dataset {config.selector} needs a tokenizer and its chat template, but neither "
            "data.tokenizer nor model.pretrained is set; name the directory of the tokenizer here"
        )
    if isinstance(config, TokensConfig):
        raise DataError(
            "data.tokenizer: the dataset tokens needs the tokenizer that made the ids, and model.pretrained names no "
            "model with one; name its directory here"
        )
    return _taking(config, "bytes")


def _taking(config: P, tokenizer: str) -> P:
    return config.model_copy(update={"tokenizer": tokenizer})


def _own(pretrained: str | None) -> Path | None:
    """Tokenizer file next to a model's weights, or next to the model exported by the run of a checkpoint."""
    directories = () if pretrained is None else Place.of(pretrained).of_the_model()
    found = (directory / TOKENIZER_FILE for directory in directories)
    return next((file for file in found if file.is_file()), None)


def _compare(config: ModelTextConfig | TokenizedConfig, own: Path) -> None:
    """Raise if the configured tokenizer gives tokens other ids than the tokenizer of the model."""
    choice = config.tokenizer
    assert choice is not None
    if isinstance(choice, BpeTokenizer):
        raise DataError(
            f"data.tokenizer: a tokenizer trained here cannot belong to existing weights; the model has {own}: "
            "remove data.tokenizer to use it"
        )
    if tokenizer_identity(choice) == tokenizer_identity(str(own)):
        return
    end = config.end_of_text if isinstance(config, TokenizedConfig) else None
    ours, theirs = make_tokenizer(choice, end, ()), make_tokenizer(str(own), None, ())
    there, here = theirs.vocabulary(), ours.vocabulary()
    other = next((token for token, number in there.items() if here.get(token) != number), None)
    if other is not None:
        given = f"has the id {here[other]}" if other in here else "is unknown"
        raise DataError(
            f"data.tokenizer: {choice} ({len(here):,} tokens) does not belong to the weights, whose tokenizer is {own} "
            f"({len(there):,} tokens): {other!r} is {there[other]} there and {given} here; remove data.tokenizer to "
            "use the model's own"
        )
