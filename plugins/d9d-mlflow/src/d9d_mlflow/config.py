"""Config of the tracker ``mlflow``."""

from __future__ import annotations

from typing import Annotated, Literal

from d9d_core.config import PluginConfig
from pydantic import Field


class MlflowConfig(PluginConfig):
    """MLflow: runs on a server, or in a store in the run's directory."""

    name: Literal["mlflow"] = "mlflow"
    """Selects this tracker."""
    experiment: Annotated[str, Field(min_length=1)] = "d9d"
    """Experiment that the run belongs to; it is created when it is missing."""
    tracking_uri: str | None = None
    """Address of the server or the store, as ``MLFLOW_TRACKING_URI`` has it; by default ``<run>/mlflow.db``."""
    lost_run: Literal["off", "new"] = "off"
    """Policy of a resumed job whose run is gone from the store: ``off`` (an error, and no tracking), or ``new``."""
