"""Config of the task ``embedding``."""

from __future__ import annotations

from typing import Literal

from d9d_core.config import PluginConfig
from pydantic import Field


class EmbeddingConfig(PluginConfig):
    """Task of telling the text that belongs to a query from all others of the batch (van den Oord et al. 2018)."""

    name: Literal["embedding"] = "embedding"
    """Selects the plugin."""
    head: str | None = None
    """The model's head to train, of kind embedding; needed if the model has several heads."""
    temperature: float = Field(default=0.05, gt=0)
    """Similarities are divided by this."""
    symmetric: bool = False
    """Also tell the query that belongs to a text from all others; the loss is the mean of both directions."""
