"""Configs of the task ``causal_lm`` and the metric ``perplexity``."""

from __future__ import annotations

from typing import Literal

from d9d_core.config import PluginConfig


class CausalLMConfig(PluginConfig):
    """Task of next-token prediction."""

    name: Literal["causal_lm"] = "causal_lm"
    """Selects the plugin."""

    head: str | None = None
    """Head to train, of kind causal_lm; required if the model has several heads."""


class PerplexityConfig(PluginConfig):
    """Metric: exponential of the mean token loss."""

    name: Literal["perplexity"] = "perplexity"
    """Selects the plugin."""
