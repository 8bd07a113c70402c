"""Config of the metric ``router``."""

from __future__ import annotations

from typing import Literal

from d9d_core.extend import PluginConfig


class RouterMetricConfig(PluginConfig):
    """How evenly and how decidedly tokens are spread over experts."""

    name: Literal["router"] = "router"
    """Selects the plugin."""

    per_layer: bool = False
    """Log each value of each layer besides those of all layers."""
