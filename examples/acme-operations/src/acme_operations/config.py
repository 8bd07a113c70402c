"""Config class of the subscriber, which defines its fields in a job file."""

from __future__ import annotations

from typing import Annotated, Literal

from d9d_core.config import PluginConfig
from pydantic import Field


class HeartbeatConfig(PluginConfig):
    """File that says which step a run reached, and when."""

    name: Literal["heartbeat"] = "heartbeat"
    """Selects this subscriber."""
    path: str = "heartbeat"
    """Name of the file, in the run's directory."""
    every: Annotated[int, Field(ge=1)] = 1
    """Steps from one write to the next."""
