"""Config classes of the task and the tracker, which define their fields in a job file."""

from __future__ import annotations

from typing import Annotated, Literal

from d9d_core.config import PluginConfig
from pydantic import Field


class SmoothLMConfig(PluginConfig):
    """Next-token prediction with label smoothing."""

    name: Literal["smooth_lm"] = "smooth_lm"
    """Selects this task."""
    smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Fraction of the target probability that is distributed evenly over the vocabulary."""


class CsvConfig(PluginConfig):
    """Tracker that writes one row per step and value to <run>/metrics.csv."""

    name: Literal["csv"] = "csv"
    """Selects this tracker."""
