"""Configs."""

from typing import Annotated, Literal

from d9d_core.config import ModelConfig, PluginConfig, ScheduleConfig, Section
from pydantic import Field


class Sizes(Section):
    """A nested section."""

    slope: float = 1.0
    """Slope of the waves."""


class ChainConfig(ModelConfig):
    """Chain of residual layers."""

    name: Literal["frozen_chain"] = "frozen_chain"
    """Selects this model."""
    width: Annotated[int, Field(ge=1)] = 8
    """Number of features."""
    depth: Annotated[int, Field(ge=1)] = 4
    """Number of layers."""


class ScaleConfig(PluginConfig):
    """Scales what the blocks return."""

    name: Literal["frozen_scale"] = "frozen_scale"
    """Selects this strategy."""
    factor: float = 1.0
    """Factor of the outputs."""


class AllForwardConfig(ScheduleConfig):
    """All forwards, then all backwards."""

    name: Literal["frozen_all_forward"] = "frozen_all_forward"
    """Selects this schedule."""


class RegressionConfig(PluginConfig):
    """Squared error, and optionally a penalty of large outputs."""

    name: Literal["frozen_regression"] = "frozen_regression"
    """Selects this task."""
    decay: Annotated[float, Field(ge=0)] = 0.0
    """Coefficient of the penalty."""


class RowsConfig(PluginConfig):
    """Mean output of each sample."""

    name: Literal["frozen_rows"] = "frozen_rows"
    """Selects this inference task."""


class TableConfig(PluginConfig):
    """Tab-separated values."""

    name: Literal["frozen_table"] = "frozen_table"
    """Selects this writer."""


class WavesConfig(PluginConfig):
    """Random features and their sines."""

    name: Literal["frozen_waves"] = "frozen_waves"
    """Selects this dataset."""
    width: int = 8
    """Number of features."""
    samples: int | None = None
    """Samples of one pass; endless without."""
    sizes: Sizes = Sizes()
    """Sizes of the waves."""


class ErrorConfig(PluginConfig):
    """Mean and largest absolute error."""

    name: Literal["frozen_error"] = "frozen_error"
    """Selects this metric."""


class LinesConfig(PluginConfig):
    """One line for each step."""

    name: Literal["frozen_lines"] = "frozen_lines"
    """Selects this tracker."""


class LastLayersConfig(PluginConfig):
    """Trains the last layers."""

    name: Literal["frozen_last_layers"] = "frozen_last_layers"
    """Selects this method."""
    layers: int = 1
    """Number of layers that are trained."""


class MomentumConfig(PluginConfig):
    """Gradient descent with momentum."""

    name: Literal["frozen_momentum"] = "frozen_momentum"
    """Selects this optimizer."""
    lr: Annotated[float, Field(gt=0)]
    """Learning rate."""
    momentum: float = 0.9
    """Factor of the previous update."""


class RampConfig(PluginConfig):
    """Rises linearly, then stays."""

    name: Literal["frozen_ramp"] = "frozen_ramp"
    """Selects this schedule."""
    steps: int = 10
    """Steps of the rise."""


class CountConfig(PluginConfig):
    """Counts steps, and ends the run after some."""

    name: Literal["frozen_count"] = "frozen_count"
    """Selects this subscriber."""
    limit: int = 1000
    """Step after which the run ends."""
