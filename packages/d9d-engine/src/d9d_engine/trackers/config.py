"""Configs of the built-in trackers."""

from __future__ import annotations

from typing import Literal

from d9d_core.config import PluginConfig

__all__ = ["ConsoleConfig", "JsonlConfig"]


class ConsoleConfig(PluginConfig):
    """Prints one line per logged step."""

    name: Literal["console"] = "console"
    """Selects this tracker."""
    series: list[str] | None = None
    """Patterns of the series to show, such as `loss*`; by default `eval/*` and names without `/` except `tokens`."""


class JsonlConfig(PluginConfig):
    """Writes one JSON object per logged step to <run>/metrics.jsonl, and draws the loss curve <run>/loss.svg.

    Tables of metrics, such as the load of each expert, go to <run>/tables.jsonl, and each is drawn as a heat map. Other
    logged values go to histograms.jsonl, texts.jsonl and pictures/<name>/<step>.png.
    """

    name: Literal["jsonl"] = "jsonl"
    """Selects this tracker."""
    picture: bool = True
    """Whether to draw the loss curve and the heat maps at the end of the run."""
