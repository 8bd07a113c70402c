"""Configs of the toy plugin."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from d9d_core.config import ModelConfig, PluginConfig
from d9d_core.data import SampleLengths


class ToyModelConfig(ModelConfig):
    """Toy model: a chain of residual blocks."""

    name: Literal["toy_model"] = "toy_model"
    """Selects this model."""
    features: int = 4
    """Number of features of inputs and outputs."""
    blocks: int = 2
    """Number of blocks."""
    dropout: float = 0.0
    """Fraction of each block's outputs that is dropped in training."""


class ToyLinearsConfig(ModelConfig):
    """Toy model: a chain of residual blocks around ``torch.nn.Linear``."""

    name: Literal["toy_linears"] = "toy_linears"
    """Selects this model."""
    features: int = 4
    """Number of features of inputs and outputs."""
    blocks: int = 2
    """Number of blocks."""


class ToyDataConfig(PluginConfig):
    """Toy dataset: random features, and a smooth function of them as targets."""

    name: Literal["toy_data"] = "toy_data"
    """Selects this dataset."""
    features: int = 4
    """Number of features of a sample."""
    nan_at: int | None = None
    """Index of the pack whose targets are NaN."""
    masked_at: int | None = None
    """Index of the pack in which all samples are masked."""
    samples: int | None = None
    """Number of samples per epoch that the dataset states in its facts; null states none."""


class ToyTokensConfig(PluginConfig):
    """Toy dataset: random tokens, with the next tokens as targets."""

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
    """Task of regression: squared error over unmasked samples, and a second loss term over all samples."""

    name: Literal["toy_task"] = "toy_task"
    """Selects this task."""
    decay: float = 0.0
    """Coefficient of the mean squared output; zero removes the term."""


class ToyOptimizerConfig(PluginConfig):
    """Toy optimizer: gradient descent with momentum."""

    name: Literal["toy_optimizer"] = "toy_optimizer"
    """Selects this optimizer."""
    lr: float = 0.05
    """Base learning rate."""


class ToyMetricConfig(PluginConfig):
    """Toy metric: mean absolute error over the logging interval."""

    name: Literal["toy_metric"] = "toy_metric"
    """Selects this metric."""


class ToyRecorderConfig(PluginConfig):
    """Toy subscriber that appends the name of every event to a file."""

    name: Literal["toy_recorder"] = "toy_recorder"
    """Selects this subscriber."""
    path: Path
    """File to which one line per event is appended."""


class ToyTrackerConfig(PluginConfig):
    """Toy tracker with a run id; one of its calls can be made to fail."""

    name: Literal["toy_tracker"] = "toy_tracker"
    """Selects this tracker."""
    path: Path | None = None
    """File to which every call is appended, one per line."""
    fails_in: Literal["nothing", "open", "write", "flush", "close"] = "nothing"
    """Call that raises."""


class ToyStrategyConfig(PluginConfig):
    """Toy strategy that halves the outputs of the first blocks."""

    name: Literal["toy_strategy"] = "toy_strategy"
    """Selects this strategy."""
    blocks: int = 1
    """Number of blocks to change; zero changes none."""


class ToyPipelineStrategyConfig(PluginConfig):
    """Strategy that requires a trait that the toy model lacks, so it is always refused."""

    name: Literal["toy_pipeline_strategy"] = "toy_pipeline_strategy"
    """Selects this strategy."""


class ToyPeftConfig(PluginConfig):
    """Toy fine-tuning method that trains some parameters of the model."""

    name: Literal["toy_peft"] = "toy_peft"
    """Selects this method."""
    trains: tuple[str, ...] = ("layers.0.weight",)
    """Names of the parameters that train."""


class ToyAdapterConfig(PluginConfig):
    """Toy fine-tuning method that trains a low-rank adapter of each linear layer."""

    name: Literal["toy_adapter"] = "toy_adapter"
    """Selects this method."""
    rank: int = 2
    """Rank of the adapters."""
    match: str = "*"
    """Pattern of the names of linear layers to adapt."""


class ToyScheduleConfig(PluginConfig):
    """Toy pipeline schedule with a selectable defect."""

    name: Literal["toy_schedule"] = "toy_schedule"
    """Selects this schedule."""
    forgets: Literal["nothing", "backward", "reduce"] = "nothing"
    """Actions missing in its programs."""
