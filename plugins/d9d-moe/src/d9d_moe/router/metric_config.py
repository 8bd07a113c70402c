"""Config of the metric ``router``; in its own file, because reading a job file imports no torch."""

from __future__ import annotations

from typing import Literal

from d9d_core.config import PluginConfig


class RouterMetricConfig(PluginConfig):
    """Metric of the balance and the entropy of routers."""

    name: Literal["router"] = "router"
    """Selects the plugin."""

    per_layer: bool = False
    """Also log each value for each layer."""
