"""Configs of the tasks ``classification`` and ``token_classification``."""

from __future__ import annotations

from typing import Literal

from d9d_core.config import PluginConfig


class ClassificationConfig(PluginConfig):
    """Task of classification with one label per sample."""

    name: Literal["classification"] = "classification"
    """Selects the plugin."""

    head: str | None = None
    """Head to train, of kind classification; required if the model has several heads."""


class TokenClassificationConfig(PluginConfig):
    """Task of classification with one label per token."""

    name: Literal["token_classification"] = "token_classification"
    """Selects the plugin."""

    head: str | None = None
    """Head to train, of kind token_classification; required if the model has several heads."""
