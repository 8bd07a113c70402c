"""Config of the tracker ``wandb``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from d9d_core.config import PluginConfig
from pydantic import Field


class WandbConfig(PluginConfig):
    """Tracker Weights & Biases: stores runs on its server, or in files to upload later with ``wandb sync``."""

    name: Literal["wandb"] = "wandb"
    """Selects this tracker."""
    project: Annotated[str, Field(min_length=1)]
    """W&B project that the run belongs to."""
    entity: str | None = None
    """User or team that owns the project; by default, the default entity of the logged-in user."""
    group: str | None = None
    """Group of runs, for example of one sweep."""
    tags: list[str] = []
    """Tags of the run, in addition to ``run.tags``."""
    mode: Literal["online", "offline"] = "online"
    """Whether to write to the server or to files; ``offline`` needs neither a network nor an account."""
    dir: Path | None = None
    """Parent directory of the folder ``wandb``; by default the run's directory. A resumed run needs the same parent."""
    capture_terminal_logs: bool = False
    """Store the terminal output of the first process."""
    lost_run: Literal["off", "new"] = "off"
    """Policy of a resumed job whose W&B run no longer exists: ``off`` (an error, and no tracking), or ``new`` (a new
    run)."""
