"""Config of the metric ``compose``."""

from __future__ import annotations

from typing import Annotated, Literal

from d9d_core.extend import Named, PluginConfig
from pydantic import Field

ChildName = Annotated[str, Field(pattern=r"^\w[\w.-]*$")]


class ComposeConfig(PluginConfig):
    """Metric: several metrics, each under a name."""

    name: Literal["compose"] = "compose"
    """Selects the plugin."""
    metrics: Annotated[dict[ChildName, Annotated[PluginConfig, Named("metric")]], Field(min_length=1)]
    """Metrics by name; their series are called ``<name>/<series>``."""
