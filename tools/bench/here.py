"""Position of a benchmark's process in the mesh of its job, and a wait for the device and all ranks."""

from __future__ import annotations

import os

import torch
from d9d_engine.distributed.mesh import Topology
from d9d_engine.job import Job
from torch import distributed as dist


def topology_of(job: Job, device: torch.device) -> Topology:
    """Topology of this process: its place in the job's mesh over the default process group."""
    return Topology(
        sizes=job.mesh.sizes(),
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        local_rank=int(os.environ["LOCAL_RANK"]),
        device=device,
        views=job.views(),
    )


def synchronise() -> None:
    """Wait for the device and for all ranks."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()
