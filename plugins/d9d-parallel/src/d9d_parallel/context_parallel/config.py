"""Config of the strategy ``context_parallel``."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from d9d_core.config import PluginConfig
from pydantic import Field, model_validator


class ContextParallelConfig(PluginConfig):
    """Context parallelism: positions of samples are split over ranks, which communicate only in attention."""

    name: Literal["context_parallel"] = "context_parallel"
    """Selects the plugin."""
    method: Literal["ulysses", "all_gather", "ring", "hybrid"] = "all_gather"
    """Exchange in attention: ``ulysses`` swaps positions for heads, ``all_gather`` gathers keys and values, ``ring``
    passes them around, ``hybrid`` combines ``ulysses`` and ``ring``."""
    head_ranks: Annotated[int, Field(ge=2)] | None = None
    """For ``hybrid``: number of neighbouring ranks that swap positions for heads; rings connect such groups."""

    @model_validator(mode="after")
    def _head_ranks_of_hybrid(self) -> Self:
        if self.method == "hybrid" and self.head_ranks is None:
            raise ValueError("method hybrid needs head_ranks, the number of neighbouring ranks that swap heads")
        if self.method != "hybrid" and self.head_ranks is not None:
            raise ValueError(f"head_ranks has no effect with method {self.method}; remove it, or choose hybrid")
        return self
