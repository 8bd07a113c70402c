"""Config classes of the subscriber and of the launcher."""

from __future__ import annotations

from typing import Annotated, Literal

from d9d_core.config import PluginConfig
from pydantic import Field, NonNegativeInt


class HeartbeatConfig(PluginConfig):
    """File that says which step a run reached, and when."""

    name: Literal["heartbeat"] = "heartbeat"
    """Selects this subscriber."""
    path: str = "heartbeat"
    """Name of the file, in the run's directory."""
    every: Annotated[int, Field(ge=1)] = 1
    """Steps from one write to the next."""


class BackgroundConfig(PluginConfig):
    """Processes on this machine that outlive the terminal."""

    name: Literal["background"] = "background"
    """Selects this launcher."""
    restarts: NonNegativeInt = 3
    """Number of restarts after one of the processes died."""
