"""Config of the launcher ``ray``."""

from __future__ import annotations

from typing import Annotated, Literal

from d9d_core.config import PluginConfig
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt


class RayConfig(PluginConfig):
    """Launcher of jobs with Ray Train: the cluster, resources of the workers, and restarts."""

    name: Literal["ray"] = "ray"
    """Selects this launcher."""
    address: (
        Annotated[str, Field(pattern=r"^(local|auto|https?://[A-Za-z0-9._:/\[\]-]+|[A-Za-z0-9._\[\]-]+:\d+)$")] | None
    ) = None
    """Cluster: ``http://HEAD:8265`` for Ray's job server; ``HOST:6379`` or ``auto`` for the cluster to which this
    machine belongs; ``local`` for a new cluster on this machine; ``null``: ``RAY_ADDRESS``, else ``local``."""
    cpus_per_process: PositiveFloat = 1
    """CPU cores that Ray reserves for each process."""
    gpus_per_process: NonNegativeFloat | None = None
    """GPUs of each process; ``null``: one, and none for a job with ``device: cpu``."""
    restarts: NonNegativeInt = 10
    """Largest number of restarts of all processes after a crash, a lost machine or a preemption."""
    startup: PositiveInt = 600
    """Seconds within which Ray must find resources for all processes and start them."""
    export: list[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]] = []
    """Names of environment variables that the processes get from the driver; Ray transfers them, no file holds them."""
