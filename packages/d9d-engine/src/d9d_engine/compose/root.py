"""Starting point of each composition: a job with its plugin records, and the topology of this process."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from d9d_core.components.instantiate import instantiate
from d9d_core.data import DataStream, TextInputs
from d9d_core.job_file.job import BaseJob, JobConfig
from d9d_core.job_file.resolve import Parts, Resolution, Selected, Selection, resolve
from d9d_core.registry.capabilities import Circumstances
from d9d_core.registry.registry import Registry
from d9d_core.task import Task, UsesTopology

from d9d_engine.compose.parts.data import open_data
from d9d_engine.distributed.mesh import Topology

AnyJob = TypeVar("AnyJob", bound=BaseJob)
AnyJob_co = TypeVar("AnyJob_co", bound=BaseJob, covariant=True)
Selected_co = TypeVar("Selected_co", bound=Parts, covariant=True)


@dataclass(frozen=True)
class Root(Generic[AnyJob_co, Selected_co]):
    """Job in this process, with its plugin records, from which components are composed.

    Attributes:
        job: validated job.
        registry: registry of the plugins.
        topology: rank, device, meshes and process groups of this process.
        resolution: plugin records of the job, and the judge of their capabilities.
        note: prints a warning or a line about a long operation.
    """

    job: AnyJob_co
    registry: Registry
    topology: Topology
    resolution: Resolution[Selected_co]
    note: Callable[[str], None]

    @property
    def selection(self) -> Selected_co:
        """Plugin records of the job."""
        return self.resolution.selection

    def open_data(self, one_pass: bool = False, inputs: TextInputs = "own") -> tuple[DataStream, str]:
        """Open the job's data; return the stream and the time it took as text. Collective over all ranks.

        On each machine, one process prepares the data first, and the other processes reuse the prepared data. The
        arguments are passed to :func:`d9d_engine.compose.parts.data.open_data`.

        Raises:
            DataError: the data cannot be opened.
        """
        started = time.perf_counter()
        with self.topology.main_first(per_machine=True):
            stream = open_data(
                self.job, self.topology, self.selection.dataset, self.job.data, self.note, one_pass, inputs
            )
        return stream, f"{time.perf_counter() - started:.1f} s"


def compose_root(
    job: AnyJob,
    selection: Selected,
    registry: Registry,
    topology: Topology,
    note: Callable[[str], None],
    around: Circumstances | None = None,
) -> Root[AnyJob, Selected]:
    """Make the root: judge a job's plugin records for this process.

    Args:
        job: validated job.
        selection: plugin records of the job.
        registry: registry of the plugins.
        topology: rank, device, meshes and process groups of this process.
        note: prints a warning or a line about a long operation.
        around: circumstances for judging capabilities; by default, the job's mesh and the topology's device.

    Raises:
        D9dError: components of the job do not fit together.
    """
    topology.watchdog.phase("startup")
    around = around or circumstances(job, topology.device)
    return Root(job, registry, topology, resolve(job, selection, registry, around), note)


def build_task(job: JobConfig, selection: Selection, topology: Topology) -> Task:
    """Build a job's task, and attach the topology if the task uses it. Collective over all ranks.

    Training, evaluation and measurements all build the task here, because its losses may depend on communication.
    """
    task: Task = instantiate(selection.task, job.task)
    if isinstance(task, UsesTopology):
        task.attach(topology)
    return task


def circumstances(job: BaseJob, device: torch.device | None) -> Circumstances:
    """Circumstances for judging capabilities; ``device`` is ``None`` if the job will run on another machine."""
    capability = None
    if device is not None and device.type == "cuda" and torch.cuda.is_available():
        capability = torch.cuda.get_device_capability(device)
    return Circumstances(job.mesh.sizes(), device.type if device else None, capability)
