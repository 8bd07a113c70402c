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
    """Pack (0-based) whose target is NaN."""
    masked_at: int | None = None
    """Pack (0-based) in which no sample counts."""
    samples: int | None = None
    """Samples that an epoch is said to have."""


class ToyTokensConfig(PluginConfig):
    """Random tokens, and the tokens after them to predict."""

    name: Literal["toy_tokens"] = "toy_tokens"
    """Selects this dataset."""
    vocab_size: int = 64
    """Number of token ids."""
    sequence_length: int = 8
    """Positions of a sample."""

    @property
    def sample_lengths(self) -> SampleLengths:
        """The length of all microbatches."""
        return SampleLengths(self.sequence_length, self.sequence_length)


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


class ToyRecorderConfig(PluginConfig):
    """Writes the name of every event."""

    name: Literal["toy_recorder"] = "toy_recorder"
    """Selects this subscriber."""
    path: Path
    """One line per event is appended to this file."""


class ToyTrackerConfig(PluginConfig):
    """A backend with a run id, which may fail."""

    name: Literal["toy_tracker"] = "toy_tracker"
    """Selects this tracker."""
    path: Path | None = None
    """Every call is written to this file, one per line."""
    fails_in: Literal["nothing", "open", "write", "flush", "close"] = "nothing"
    """The call that raises."""


class ToyStrategyConfig(PluginConfig):
    """Scales the outputs of blocks."""

    name: Literal["toy_strategy"] = "toy_strategy"
    """Selects this strategy."""
    blocks: int = 1
    """How many blocks; with zero it matches nothing."""


class ToyPipelineStrategyConfig(PluginConfig):
    """Needs a trait that the toy model lacks."""

    name: Literal["toy_pipeline_strategy"] = "toy_pipeline_strategy"
    """Selects this strategy."""


class ToyPeftConfig(PluginConfig):
    """Trains some parameters."""

    name: Literal["toy_peft"] = "toy_peft"
    """Selects this method."""
    trains: tuple[str, ...] = ("layers.0.weight",)
    """Names of the parameters that train."""


class ToyAdapterConfig(PluginConfig):
    """Trains a low-rank term beside each linear layer."""

    name: Literal["toy_adapter"] = "toy_adapter"
    """Selects this method."""
    rank: int = 2
    """Rank of the added terms."""
    match: str = "*"
    """Pattern over the names of the linear layers that are adapted."""


class ToyScheduleConfig(PluginConfig):
    """A schedule with a defect of choice."""

    name: Literal["toy_schedule"] = "toy_schedule"
    """Selects this schedule."""
    forgets: Literal["nothing", "backward", "reduce"] = "nothing"
    """The action that its programs lack."""
