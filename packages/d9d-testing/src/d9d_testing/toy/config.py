"""Configs of the toy plugin."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from d9d_core.config import ModelConfig, PluginConfig
from d9d_core.data import SampleLengths


class ToyModelConfig(ModelConfig):
    """A chain of residual blocks."""

    name: Literal["toy_model"] = "toy_model"
    """Selects this model."""
    features: int = 4
    """Width."""
    blocks: int = 2
    """Depth."""
    dropout: float = 0.0
    """Fraction of each block's outputs that is dropped in training."""


class ToyLinearsConfig(ModelConfig):
    """A chain of residual blocks around ``torch.nn.Linear``."""

    name: Literal["toy_linears"] = "toy_linears"
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
    """Index of the pack whose targets are NaN."""
    masked_at: int | None = None
    """Index of the pack in which all samples are masked."""
    samples: int | None = None
    """Stated number of samples per epoch."""


class ToyTokensConfig(PluginConfig):
    """Random tokens, with the next tokens as targets."""

    name: Literal["toy_tokens"] = "toy_tokens"
    """Selects this dataset."""
    vocab_size: int = 64
    """Number of token ids."""
    sequence_length: int = 8
    """Positions of a sample."""

    @property
    def sample_lengths(self) -> SampleLengths:
        return SampleLengths(self.sequence_length, self.sequence_length)


class ToyTaskConfig(PluginConfig):
    """Squared error, and a second loss term with another denominator."""

    name: Literal["toy_task"] = "toy_task"
    """Selects this task."""
    decay: float = 0.0
    """Coefficient of the mean squared output; zero removes the term."""


class ToyOptimizerConfig(PluginConfig):
    """Gradient descent with momentum."""

    name: Literal["toy_optimizer"] = "toy_optimizer"
    """Selects this optimizer."""
    lr: float = 0.05
    """Base learning rate."""


class ToyMetricConfig(PluginConfig):
    """Mean absolute error over the logging interval."""

    name: Literal["toy_metric"] = "toy_metric"
    """Selects this metric."""


class ToyRecorderConfig(PluginConfig):
    """Appends the name of every event to a file."""

    name: Literal["toy_recorder"] = "toy_recorder"
    """Selects this subscriber."""
    path: Path
    """File to which one line per event is appended."""


class ToyTrackerConfig(PluginConfig):
    """Tracker with a run id, which can be made to fail."""

    name: Literal["toy_tracker"] = "toy_tracker"
    """Selects this tracker."""
    path: Path | None = None
    """File to which every call is appended, one per line."""
    fails_in: Literal["nothing", "open", "write", "flush", "close"] = "nothing"
    """Call that raises."""


class ToyStrategyConfig(PluginConfig):
    """Scales the outputs of blocks."""

    name: Literal["toy_strategy"] = "toy_strategy"
    """Selects this strategy."""
    blocks: int = 1
    """Number of blocks; zero matches nothing."""


class ToyPipelineStrategyConfig(PluginConfig):
    """Requires a trait that the toy model lacks."""

    name: Literal["toy_pipeline_strategy"] = "toy_pipeline_strategy"
    """Selects this strategy."""


class ToyPeftConfig(PluginConfig):
    """Trains some parameters."""

    name: Literal["toy_peft"] = "toy_peft"
    """Selects this method."""
    trains: tuple[str, ...] = ("layers.0.weight",)
    """Names of the parameters that train."""


class ToyAdapterConfig(PluginConfig):
    """Trains a low-rank adapter of each linear layer."""

    name: Literal["toy_adapter"] = "toy_adapter"
    """Selects this method."""
    rank: int = 2
    """Rank of the adapters."""
    match: str = "*"
    """Pattern of the names of linear layers to adapt."""


class ToyScheduleConfig(PluginConfig):
    """Schedule with a selectable defect."""

    name: Literal["toy_schedule"] = "toy_schedule"
    """Selects this schedule."""
    forgets: Literal["nothing", "backward", "reduce"] = "nothing"
    """Actions missing in its programs."""
