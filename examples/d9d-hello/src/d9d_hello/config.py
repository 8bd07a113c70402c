"""What a job file says about the task and the tracker."""

from __future__ import annotations

from typing import Annotated, Literal

from d9d_core.config import PluginConfig
from pydantic import Field


class SmoothLMConfig(PluginConfig):
    """Next-token prediction with label smoothing."""

    name: Literal["smooth_lm"] = "smooth_lm"
    """Selects this task."""
    smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of the probability that is spread evenly over the vocabulary."""


class CsvConfig(PluginConfig):
    """One row per step and value in <run>/metrics.csv."""

    name: Literal["csv"] = "csv"
    """Selects this tracker."""
