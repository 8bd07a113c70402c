"""Configs of the toy plugin."""

from __future__ import annotations

from typing import Literal

from d9d_core.config.base import PluginConfig


class ToyModelConfig(PluginConfig):
    """A chain of residual blocks."""

    name: Literal["toy_model"] = "toy_model"
    """Selects this model."""
    features: int = 4
    """Width."""
    blocks: int = 2
    """Depth."""


class ToyDataConfig(PluginConfig):
    """Random features and a smooth function of them."""

    name: Literal["toy_data"] = "toy_data"
    """Selects this dataset."""
    features: int = 4
    """Width."""
    nan_at: int | None = None
    """Pack (0-based) whose target is NaN."""
    masked_at: int | None = None
    """Pack (0-based) in which no sample counts."""


class ToyTaskConfig(PluginConfig):
    """Squared error, and a second term with another denominator."""

    name: Literal["toy_task"] = "toy_task"
    """Selects this task."""
    decay: float = 0.0
    """Coefficient of the mean squared output; zero leaves the term out."""


class ToyOptimizerConfig(PluginConfig):
    """Gradient descent with momentum."""

    name: Literal["toy_optimizer"] = "toy_optimizer"
    """Selects this optimizer."""
    lr: float = 0.05
    """Base learning rate."""


class ToyMetricConfig(PluginConfig):
    """Mean absolute error since the last log entry."""

    name: Literal["toy_metric"] = "toy_metric"
    """Selects this metric."""
