"""Config of the tracker ``wandb``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from d9d_core.config import PluginConfig
from pydantic import Field


class WandbConfig(PluginConfig):
    """Weights & Biases: runs on its server, or in files that ``wandb sync`` uploads later."""

    name: Literal["wandb"] = "wandb"
    """Selects this tracker."""
    project: Annotated[str, Field(min_length=1)]
    """Project that the run belongs to."""
    entity: str | None = None
    """User or team that the project belongs to; by default that of whoever is logged in."""
    group: str | None = None
    """Group of runs, for example of one sweep."""
    tags: list[str] = []
    """Words by which runs are found, besides those of ``run.tags``."""
    mode: Literal["online", "offline"] = "online"
    """``offline`` needs neither a network nor an account."""
    dir: Path | None = None
    """Directory that gets the folder ``wandb``; by default the run's. A resumed run needs the same one."""
    capture_terminal_logs: bool = False
    """Keep what the first process prints."""
    lost_run: Literal["off", "new"] = "off"
    """Policy of a resumed job whose run is gone: ``off`` (an error, and no tracking), or ``new``."""
