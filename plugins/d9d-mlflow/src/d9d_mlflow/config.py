"""Config of the tracker ``mlflow``."""

from __future__ import annotations

from typing import Annotated, Literal

from d9d_core.config import PluginConfig
from pydantic import Field


class MlflowConfig(PluginConfig):
    """Tracker MLflow: stores runs on a server, or in a database in the run's directory."""

    name: Literal["mlflow"] = "mlflow"
    """Selects this tracker."""
    experiment: Annotated[str, Field(min_length=1)] = "d9d"
    """MLflow experiment that the run belongs to; created if it does not exist."""
    tracking_uri: str | None = None
    """Address of the server or store, as in ``MLFLOW_TRACKING_URI``; by default the database ``<run>/mlflow.db``."""
    lost_run: Literal["off", "new"] = "off"
    """Policy of a resumed job whose MLflow run no longer exists: ``off`` (an error, and no tracking), or ``new`` (a new
    run)."""
