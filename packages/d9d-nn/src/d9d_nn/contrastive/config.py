"""Config of the task ``embedding``."""

from __future__ import annotations

from typing import Literal

from d9d_core.config import PluginConfig
from pydantic import Field


class EmbeddingConfig(PluginConfig):
    """Task of finding the text that belongs to a query among all texts of the batch (van den Oord et al. 2018)."""

    name: Literal["embedding"] = "embedding"
    """Selects the plugin."""
    head: str | None = None
    """Head to train, of kind embedding; required if the model has several heads."""
    temperature: float = Field(default=0.05, gt=0)
    """Divisor of the similarities."""
    symmetric: bool = False
    """Also find the query that belongs to a text among all queries; the loss is the mean of both directions."""
