"""Configs of the engine's subscribers."""

from __future__ import annotations

from typing import Annotated, Literal

from d9d_core.config import PluginConfig
from pydantic import Field, PositiveInt, field_validator

#: Series that do not measure the model. Some of them differ between ranks, so ranks would end at different steps.
_NOT_COMPARED = ("tokens_per_second", "tokens", "lr", "skipped_steps", "mfu")


class EarlyStoppingConfig(PluginConfig):
    """Ends the run when a logged series no longer improves."""

    name: Literal["early_stopping"] = "early_stopping"
    """Selects this subscriber."""
    series: str = "eval/loss"
    """Series to observe, such as ``eval/held_out/loss`` for a named evaluation set."""
    patience: PositiveInt = 3
    """Number of consecutive values without improvement after which the run is saved and ends."""
    min_delta: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """A value is an improvement if it is better than the best value so far by more than this difference."""
    mode: Literal["min", "max"] = "min"
    """Whether smaller or larger values are better."""

    @field_validator("series")
    @classmethod
    def _can_be_compared(cls, series: str) -> str:
        if series in _NOT_COMPARED:
            raise ValueError(f"'{series}' does not measure the model; use a loss or a metric, such as eval/loss")
        return series
