"""Configs of the engine's subscribers."""

from __future__ import annotations

from typing import Annotated, Literal

from d9d_core.config import PluginConfig
from pydantic import Field, PositiveInt, field_validator

#: Series that differ from rank to rank, so that ranks would end at different steps, or that never stop getting better.
_NOT_COMPARED = ("tokens_per_second", "tokens", "lr", "skipped_steps", "mfu")


class EarlyStoppingConfig(PluginConfig):
    """End of a run when a logged series gets no better."""

    name: Literal["early_stopping"] = "early_stopping"
    """Selects this subscriber."""
    series: str = "eval/loss"
    """Name of the series, such as ``eval/held_out/loss`` of a named set."""
    patience: PositiveInt = 3
    """Number of values in a row that may be no better than the best one before; then the run is saved, and ends."""
    min_delta: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Least improvement of a value that counts as better."""
    mode: Literal["min", "max"] = "min"
    """Direction of improvement: smaller or larger values are better."""

    @field_validator("series")
    @classmethod
    def _can_be_compared(cls, series: str) -> str:
        if series in _NOT_COMPARED:
            raise ValueError(f"'{series}' says nothing about the model; take a loss or a metric, such as eval/loss")
        return series
