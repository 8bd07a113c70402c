"""Configs of the metrics ``sum``, ``mean``, ``weighted_mean``, ``max`` and ``min``."""

from __future__ import annotations

from collections.abc import Set
from typing import Literal

from d9d_core.config import PluginConfig


class AggregateConfig(PluginConfig):
    """Base of the configs of metrics that reduce the values of one observation to one number."""

    values: str
    """Name of the observation to aggregate."""
    mask: str | None = None
    """Observation that selects values: bools, or integers that are -100 for ignored values, such as ``targets``. Its
    shape is the values' shape or the leading dims of that shape."""
    series: str | None = None
    """Name of the series; ``<metric>_<values>`` by default."""

    @property
    def reads(self) -> Set[str]:
        """Names of the observations to read."""
        return {self.values} | ({self.mask} if self.mask else set())

    @property
    def logged(self) -> str:
        """Name of the series."""
        return self.series or f"{self.selector}_{self.values}"


class SumConfig(AggregateConfig):
    """Metric: sum of the values."""

    name: Literal["sum"] = "sum"
    """Selects the plugin."""


class MeanConfig(AggregateConfig):
    """Metric: mean of the values."""

    name: Literal["mean"] = "mean"
    """Selects the plugin."""


class WeightedMeanConfig(AggregateConfig):
    """Metric: mean of the values, each with a weight."""

    name: Literal["weighted_mean"] = "weighted_mean"
    """Selects the plugin."""
    weights: str
    """Observation with the weights; its shape is the values' shape or the leading dims of that shape."""

    @property
    def reads(self) -> Set[str]:
        """Names of the observations to read."""
        return {*super().reads, self.weights}


class MaxConfig(AggregateConfig):
    """Metric: largest value."""

    name: Literal["max"] = "max"
    """Selects the plugin."""


class MinConfig(AggregateConfig):
    """Metric: smallest value."""

    name: Literal["min"] = "min"
    """Selects the plugin."""
