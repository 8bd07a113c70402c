"""Metrics ``sum``, ``mean``, ``weighted_mean``, ``max`` and ``min``."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from d9d_core.accumulators import AccumulatedMetric, Accumulator
from d9d_core.tensors import wide_dtype
from torch import Tensor

from d9d_metrics.aggregate.config import (
    AggregateConfig,
    MaxConfig,
    MeanConfig,
    MinConfig,
    SumConfig,
    WeightedMeanConfig,
)
from d9d_metrics.observations import counted, read, spread


class Aggregate(AccumulatedMetric):
    """Base of metrics that aggregate all selected values of one observation.

    Args:
        config: names of the observations and the series.
        accumulators: accumulators by name.
    """

    def __init__(self, config: AggregateConfig, **accumulators: Accumulator) -> None:
        super().__init__(**accumulators)
        self.config: AggregateConfig = config

    def values(self, observations: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """Values in float64 (float32 on MPS), and a bool mask of the selected values; ``None`` if all are selected.

        Raises:
            JobError: an observation is missing, or the mask has a floating-point dtype or does not fit the values.
        """
        config, name = self.config, self.config.selector
        values = read(observations, config.values, name)
        values = values.detach().to(wide_dtype(values.device))
        if config.mask is None:
            return values, None
        mask = read(observations, config.mask, name)
        return values, counted(mask, values, (config.mask, config.values), name)


class Sum(Aggregate):
    """Sum of the values, in float64.

    Args:
        config: names of the observations and the series.
    """

    def __init__(self, config: SumConfig) -> None:
        super().__init__(config, total=Accumulator())

    def update(self, observations: Mapping[str, Tensor]) -> None:
        """Add the values of one microbatch."""
        values, mask = self.values(observations)
        self.accumulate(total=(values if mask is None else values.where(mask, 0)).sum())

    def compute(self) -> Mapping[str, Tensor]:
        """Compute the series; 0 before the first value."""
        return {self.config.logged: self["total"]}


class Mean(Aggregate):
    """Aggregate metric: mean of the values, in float64; NaN before the first value.

    Args:
        config: names of the observations and the series.
    """

    def __init__(self, config: MeanConfig) -> None:
        super().__init__(config, total=Accumulator(), count=Accumulator(dtype=torch.int64))

    def update(self, observations: Mapping[str, Tensor]) -> None:
        """Add the values of one microbatch."""
        values, mask = self.values(observations)
        if mask is None:
            self.accumulate(total=values.sum(), count=values.numel())
        else:
            self.accumulate(total=values.where(mask, 0).sum(), count=mask.sum())

    def compute(self) -> Mapping[str, Tensor]:
        return {self.config.logged: self["total"] / self["count"]}


class WeightedMean(Aggregate):
    """Aggregate metric: weighted mean ``sum(weight * value) / sum(weight)``, float64; NaN if the weights sum to zero.

    Values with weight zero are ignored, even NaN. ``state()`` has the accumulated ``weight``.

    Args:
        config: names of the observations and the series.
    """

    def __init__(self, config: WeightedMeanConfig) -> None:
        super().__init__(config, total=Accumulator(), weight=Accumulator())
        self._weights = config.weights

    def update(self, observations: Mapping[str, Tensor]) -> None:
        """Add the values of one microbatch.

        Raises:
            JobError: an observation is missing, or the shape of the mask or of the weights does not fit the values.
        """
        values, mask = self.values(observations)
        name = self.config.selector
        given = read(observations, self._weights, name).detach().to(values.dtype)
        weights = spread(given, values, (self._weights, self.config.values), name)
        if mask is not None:
            weights = weights.where(mask, 0)
        self.accumulate(total=(values * weights).where(weights != 0, 0).sum(), weight=weights.sum())

    def compute(self) -> Mapping[str, Tensor]:
        return {self.config.logged: self["total"] / self["weight"]}


class Max(Aggregate):
    """Aggregate metric: largest value; minus infinity before the first value. Merging ranks may lose a NaN.

    Args:
        config: names of the observations and the series.
    """

    def __init__(self, config: MaxConfig) -> None:
        super().__init__(config, largest=Accumulator("max"))

    def update(self, observations: Mapping[str, Tensor]) -> None:
        """Include the values of one microbatch."""
        values, mask = self.values(observations)
        if values.numel():
            self.accumulate(largest=(values if mask is None else values.where(mask, -torch.inf)).max())

    def compute(self) -> Mapping[str, Tensor]:
        return {self.config.logged: self["largest"]}


class Min(Aggregate):
    """Aggregate metric: smallest value; infinity before the first value. Merging ranks may lose a NaN.

    Args:
        config: names of the observations and the series.
    """

    def __init__(self, config: MinConfig) -> None:
        super().__init__(config, smallest=Accumulator("min"))

    def update(self, observations: Mapping[str, Tensor]) -> None:
        """Include the values of one microbatch."""
        values, mask = self.values(observations)
        if values.numel():
            self.accumulate(smallest=(values if mask is None else values.where(mask, torch.inf)).min())

    def compute(self) -> Mapping[str, Tensor]:
        return {self.config.logged: self["smallest"]}
