"""Configs of the inference tasks."""

from __future__ import annotations

from typing import Literal

from d9d_core.config import PluginConfig
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, field_validator


class LogProbsConfig(PluginConfig):
    """Inference task: log-probabilities of the targets."""

    name: Literal["log_probs"] = "log_probs"
    """Selects the plugin."""
    per: Literal["row", "token"] = "row"
    """``row``: one number for each row. ``token``: also a list with one number for each target of the row."""
    head: str | None = None
    """The model's head to read, of kind causal_lm; needed if the model has several heads."""


class PerplexityRowsConfig(PluginConfig):
    """Inference task: perplexity of each row, and of all rows."""

    name: Literal["perplexity"] = "perplexity"
    """Selects the plugin."""
    head: str | None = None
    """The model's head to read, of kind causal_lm; needed if the model has several heads."""


class ClassesConfig(PluginConfig):
    """Inference task: class of each row, with the probabilities of all classes."""

    name: Literal["classes"] = "classes"
    """Selects the plugin."""
    head: str | None = None
    """The model's head to read, of kind classification; needed if the model has several heads."""
    labels: tuple[str, ...] | None = None
    """Names of the classes, in order; null takes them from the data, if it states them, else numbers the classes."""


class TokenClassesConfig(PluginConfig):
    """Inference task: class of each token."""

    name: Literal["token_classes"] = "token_classes"
    """Selects the plugin."""
    head: str | None = None
    """The model's head to read, of kind token_classification; needed if the model has several heads."""
    labels: tuple[str, ...] | None = None
    """Names of the classes, in order; null takes them from the data, if it states them, else numbers the classes."""


class RewardsConfig(PluginConfig):
    """Inference task: score of each row, from a classification head of one class."""

    name: Literal["rewards"] = "rewards"
    """Selects the plugin."""
    head: str | None = None
    """The model's head to read, of kind classification; needed if the model has several heads."""


class EmbeddingsConfig(PluginConfig):
    """Inference task: embedding of each row."""

    name: Literal["embeddings"] = "embeddings"
    """Selects the plugin."""
    head: str | None = None
    """The model's head to read, of kind embedding; needed if the model has several heads."""


class HiddenStatesConfig(PluginConfig):
    """Inference task: outputs of chosen layers."""

    name: Literal["hidden_states"] = "hidden_states"
    """Selects the plugin."""
    layers: tuple[int, ...] = Field(default=(-1,), min_length=1)
    """Layers, counted from 0, or from the end if negative."""
    pooling: Literal["last", "mean", "none"] = "last"
    """Represents a row by its last position, by the mean of all positions, or by all of them in order."""

    @field_validator("layers")
    @classmethod
    def _each_once(cls, layers: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(layers)) < len(layers):
            raise ValueError(f"a layer appears twice in {list(layers)}; name each once")
        return layers


class GenerationsConfig(PluginConfig):
    """Inference task: continuation of each row."""

    name: Literal["generations"] = "generations"
    """Selects the plugin."""
    max_new_tokens: PositiveInt = 128
    """Maximum number of tokens of a continuation."""
    temperature: NonNegativeFloat = 0.0
    """Divides the logits before a token is drawn; 0 takes the most probable token."""
    seed: NonNegativeInt = 0
    """Seed of the random draws; each depends only on the seed, the index of the row and the index of the token."""
    stop: tuple[NonNegativeInt, ...] | None = None
    """Ids of the tokens that end a continuation; null takes them from the model, else from the data."""
    head: str | None = None
    """The model's head to read, of kind causal_lm; needed if the model has several heads."""
