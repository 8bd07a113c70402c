"""Configs of the built-in trackers."""

from __future__ import annotations

from typing import Literal

from d9d_core.config import PluginConfig

__all__ = ["ConsoleConfig", "JsonlConfig"]


class ConsoleConfig(PluginConfig):
    """Console: one line per logged step."""

    name: Literal["console"] = "console"
    """Selects this tracker."""
    series: list[str] | None = None
    """Patterns of the series to show, such as `loss*`; by default `eval/*` and all without `/`, but for `tokens`."""


class JsonlConfig(PluginConfig):
    """JSON lines: one object per logged step in <run>/metrics.jsonl, and the loss curve <run>/loss.svg.

    Tables of metrics, such as the load of each expert, go to <run>/tables.jsonl and become one heat map each. What else
    a task or a subscriber logs goes to histograms.jsonl, texts.jsonl and pictures/<name>/<step>.png.
    """

    name: Literal["jsonl"] = "jsonl"
    """Selects this tracker."""
    picture: bool = True
    """Draw the loss curve and the heat maps when the run ends."""
