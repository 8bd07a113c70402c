"""Task of a job, as training and evaluation of a trained model build it."""

from __future__ import annotations

from d9d_core.components.instantiate import instantiate
from d9d_core.job_file.job import JobConfig
from d9d_core.job_file.resolve import Selection
from d9d_core.task import Task, UsesTopology

from d9d_engine.distributed.mesh import Topology


def build_task(job: JobConfig, selection: Selection, topology: Topology) -> Task:
    """Build a job's task, and tell it the topology if it wants to know. Collective over all ranks.

    Losses may depend on what a task communicates, so whoever asks for them builds the task here.
    """
    task: Task = instantiate(selection.task, job.task)
    if isinstance(task, UsesTopology):
        task.attach(topology)
    return task
