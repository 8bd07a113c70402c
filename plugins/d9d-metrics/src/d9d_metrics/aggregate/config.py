"""Configs of the metrics ``sum``, ``mean``, ``weighted_mean``, ``max`` and ``min``."""

from __future__ import annotations

from collections.abc import Set
from typing import Literal

from d9d_core.config import PluginConfig


class AggregateConfig(PluginConfig):
    """Metric over all values of an observation."""

    values: str
    """Observation that is read."""
    mask: str | None = None
    """Observation that says which values count: bools, or integers of which -100 does not count, such as ``targets``;
    of the shape of the values, or of their leading dims."""
    series: str | None = None
    """Name of the series; ``<metric>_<values>`` by default."""

    @property
    def reads(self) -> Set[str]:
        """Observations that are read."""
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
    """Observation of the weights: of the shape of the values, or of their leading dims."""

    @property
    def reads(self) -> Set[str]:
        """Observations that are read."""
        return {*super().reads, self.weights}


class MaxConfig(AggregateConfig):
    """Metric: largest value."""

    name: Literal["max"] = "max"
    """Selects the plugin."""


class MinConfig(AggregateConfig):
    """Metric: smallest value."""

    name: Literal["min"] = "min"
    """Selects the plugin."""
