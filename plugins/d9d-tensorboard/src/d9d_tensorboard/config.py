"""Config of the tracker ``tensorboard``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from d9d_core.config import PluginConfig
from pydantic import Field


class TensorBoardConfig(PluginConfig):
    """Tracker TensorBoard: writes event files, which ``tensorboard --logdir`` shows."""

    name: Literal["tensorboard"] = "tensorboard"
    """Selects this tracker."""
    log_dir: Path | None = None
    """Directory of the event files, which runs may share; by default ``<run>/tensorboard``."""
    flush_seconds: Annotated[float, Field(gt=0, le=3600)] = 10.0
    """Seconds since the last flush after which newly logged values flush the file; a checkpoint also flushes it."""
