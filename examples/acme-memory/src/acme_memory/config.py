"""Config classes, which define the fields of the components in a job file."""

from __future__ import annotations

from typing import Annotated, Literal

from d9d_core.config import PluginConfig
from pydantic import Field


class CopyingConfig(PluginConfig):
    """Random symbols, a separator, and the same symbols again."""

    name: Literal["copying"] = "copying"
    """Selects this dataset."""
    symbols: Annotated[int, Field(ge=1)] = 4
    """Number of symbols to remember."""
    vocab_size: Annotated[int, Field(ge=3)] = 8
    """Number of token ids; 0 is the separator, all others are symbols."""
    samples: Annotated[int, Field(ge=1)] = 64
    """Number of samples of one pass, for evaluation and inference; training reads an endless stream."""


class NgramConfig(PluginConfig):
    """Feed-forward network over a fixed number of tokens."""

    name: Literal["ngram"] = "ngram"
    """Selects this model."""
    vocab_size: Annotated[int, Field(ge=2)] = 256
    """Number of token ids."""
    context: Annotated[int, Field(ge=1)] = 4
    """Number of tokens that a prediction sees, the current one included."""
    hidden_size: Annotated[int, Field(ge=1)] = 32
    """Features of a token, and a quarter of the features of the hidden layer."""


class RecallConfig(PluginConfig):
    """Share of targets that get more than half of the probability."""

    name: Literal["recall"] = "recall"
    """Selects this metric."""


class RecallRowsConfig(PluginConfig):
    """Share of recalled targets of each sample."""

    name: Literal["recall"] = "recall"
    """Selects this inference task."""


class CsvConfig(PluginConfig):
    """CSV with JSON values as cells."""

    name: Literal["csv"] = "csv"
    """Selects this writer."""
    delimiter: Literal[",", ";", "\t"] = ","
    """Character between two cells."""


def tiny() -> NgramConfig:
    """Config that runs in milliseconds on a CPU, for tests and ``d9d verify``."""
    return NgramConfig(vocab_size=64, hidden_size=16)
