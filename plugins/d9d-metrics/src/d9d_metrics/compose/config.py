"""Config of the metric ``compose``."""

from __future__ import annotations

from typing import Annotated, Literal

from d9d_core.config import PluginConfig
from d9d_core.job_file.open_union import Named
from pydantic import Field, field_validator

ChildName = Annotated[str, Field(pattern=r"^\w[\w.-]*$")]


class ComposeConfig(PluginConfig):
    """Metric: several metrics, each under a name."""

    name: Literal["compose"] = "compose"
    """Selects the plugin."""
    metrics: dict[ChildName, Annotated[PluginConfig, Named("metric")]]
    """Metrics by name; their series are called ``<name>/<series>``."""

    @field_validator("metrics")
    @classmethod
    def _something_is_composed(cls, metrics: dict[str, PluginConfig]) -> dict[str, PluginConfig]:
        if not metrics:
            raise ValueError("metrics is empty; write names with metrics, such as {loss: {name: mean, values: x}}")
        return metrics
