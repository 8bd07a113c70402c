"""Root that every composition starts from: a job in this process, whose names are looked up and judged once."""

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
    """Root of what a job is composed to in this process.

    Attributes:
        job: validated.
        registry: meaning of its names.
        topology: this process among others, and its device.
        resolution: records of the job, and what judges others in their company.
        note: prints a line about long work or a warning.
    """

    job: AnyJob_co
    registry: Registry
    topology: Topology
    resolution: Resolution[Selected_co]
    note: Callable[[str], None]

    @property
    def selection(self) -> Selected_co:
        """Records behind the job's names."""
        return self.resolution.selection

    def open_data(self, one_pass: bool = False, inputs: TextInputs = "own") -> tuple[DataStream, str]:
        """Open the job's data, and say how long it took. Collective over all ranks.

        One process of each machine prepares what the others find. Arguments are those of
        :func:`d9d_engine.compose.parts.data.open_data`.

        Raises:
            DataError: it cannot be opened.
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
    """Compose the root: judge a job's records for this process.

    Args:
        job: validated.
        selection: its records.
        registry: meaning of its names.
        topology: this process among others, and its device.
        note: prints a line about long work or a warning.
        around: what capabilities are judged against; by default, the job's mesh and the topology's device.

    Raises:
        D9dError: the components of the job do not go together.
    """
    topology.watchdog.phase("startup")
    around = around or circumstances(job, topology.device)
    return Root(job, registry, topology, resolve(job, selection, registry, around), note)


def build_task(job: JobConfig, selection: Selection, topology: Topology) -> Task:
    """Build a job's task, and tell it the topology if it wants to know. Collective over all ranks.

    Losses may depend on what a task communicates, so whoever asks for them builds the task here.
    """
    task: Task = instantiate(selection.task, job.task)
    if isinstance(task, UsesTopology):
        task.attach(topology)
    return task


def circumstances(job: BaseJob, device: torch.device | None) -> Circumstances:
    """Circumstances that capabilities are judged against; ``device`` is ``None`` where the job will run elsewhere."""
    capability = None
    if device is not None and device.type == "cuda" and torch.cuda.is_available():
        capability = torch.cuda.get_device_capability(device)
    return Circumstances(job.mesh.sizes(), device.type if device else None, capability)
