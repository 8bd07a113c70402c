"""Config of the launcher ``skypilot``."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from d9d_core.config import PluginConfig
from pydantic import AfterValidator, Field, NonNegativeInt, PositiveInt, model_validator


def _of_one_line(line: str) -> str:
    if any(ord(character) < 32 for character in line):
        raise ValueError("an entry is one line of shell; write several entries")
    return line


class SkyPilotConfig(PluginConfig):
    """Launcher of managed jobs of SkyPilot: the machines of a job, and the storage of the runs."""

    name: Literal["skypilot"] = "skypilot"
    """Selects this launcher."""
    infra: Annotated[str, Field(pattern=r"^[A-Za-z0-9*][A-Za-z0-9._/*:@-]*$")] | None = None
    """Cloud, region or cluster, such as ``aws/us-east-1`` or ``k8s/context``; ``null``: the cheapest suitable one."""
    gpu: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] | None = None
    """Name of the GPUs, such as ``H100``; required unless the job has ``device: cpu``."""
    gpus_per_node: PositiveInt | None = None
    """GPUs per machine; ``null``: one for each process."""
    cpus: PositiveInt | None = None
    """Smallest number of CPU cores per machine; ``null``: SkyPilot's choice."""
    memory_gib: PositiveInt | None = None
    """Smallest memory per machine in GiB; ``null``: SkyPilot's choice."""
    disk_gib: PositiveInt | None = None
    """Disk size of each machine in GiB; ``null``: SkyPilot's choice."""
    spot: bool = False
    """Use machines that the cloud may take away; the job then continues on other machines."""
    image: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/@-]*$")] | None = None
    """Docker image with d9d and the job's plugins; ``null``: SkyPilot's image, on which ``setup`` installs them."""
    volume: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] | None = None
    """Name of a volume of SkyPilot that holds the runs, and that all machines of a job can write."""
    bucket: Annotated[str, Field(pattern=r"^[a-z0-9]+://[A-Za-z0-9][A-Za-z0-9._/-]*$")] | None = None
    """Bucket that holds the runs instead of a volume, such as ``s3://team-runs``; only for jobs on one machine."""
    mount: Annotated[str, Field(pattern=r"^(/[A-Za-z0-9._-]+)+$")] = "/runs"
    """Path of the volume or the bucket on the machines; it replaces ``run.dir`` of the job."""
    setup: list[Annotated[str, AfterValidator(_of_one_line)]] = []
    """Lines of shell that run once on each machine, such as ``pip install d9d-all``. They are stored in a readable
    file, so write no secrets in them."""
    secrets: list[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]] = []
    """Names of environment variables that the job gets as SkyPilot secrets; the command ``sky`` reads their values."""
    python: Annotated[str, Field(pattern=r"^[A-Za-z0-9_./-]+$")] = "python3"
    """Python interpreter on the machines."""
    restarts: NonNegativeInt = 10
    """Largest number of restarts on the same machines after a crash; preemptions do not count."""

    @model_validator(mode="after")
    def _one_storage(self) -> Self:
        if (self.volume is None) == (self.bucket is None):
            raise ValueError("give either volume or bucket: machines of SkyPilot end with the job, and their disks too")
        return self
