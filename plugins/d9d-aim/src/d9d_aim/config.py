"""Config of the tracker ``aim``."""

from __future__ import annotations

from typing import Annotated, Literal

from d9d_core.config import PluginConfig
from pydantic import AfterValidator, Field


def _of_aim(repo: str) -> str:
    if "://" in repo and not repo.startswith("aim://"):
        raise ValueError("an address must name a server, aim://host:port; otherwise give a directory of this machine")
    return repo


class AimConfig(PluginConfig):
    """Tracker Aim: stores runs on a server, or in a local repository that ``aim up`` shows."""

    name: Literal["aim"] = "aim"
    """Selects this tracker."""
    repo: Annotated[str, AfterValidator(_of_aim)] | None = None
    """Directory of Aim's repository, or address of a server (``aim://host:port``); by default ``<run>/aim``."""
    experiment: str | None = None
    """Aim experiment that the run belongs to; by default, Aim's default experiment."""
    log_system_params: bool = True
    """Store the environment: packages, git state, command line and environment variables."""
    capture_terminal_logs: bool = True
    """Store the terminal output of the first process."""
    system_tracking_interval: Annotated[float, Field(gt=0)] | None = 10.0
    """Seconds between samples of CPU, memory and GPU utilisation; ``null`` for none."""
    lost_run: Literal["off", "new"] = "off"
    """Policy of a resumed job whose Aim run no longer exists: ``off`` (an error, and no tracking), or ``new`` (a new
    run)."""
