"""Texts about a job's length and mesh, which several commands print."""

from __future__ import annotations

from d9d_core.job import JobFile
from d9d_core.job_file.job import JobConfig


def length_of(job: JobConfig) -> str:
    """Length of a run in steps or epochs, as text."""
    if job.steps is not None:
        return f"{job.steps:,} steps"
    return f"epochs: {job.epochs:g}; the number of steps follows from the data, which was not read"


def mesh_line(job: JobFile) -> str:
    """Mesh of a job as text, with the size of its ``auto`` axis; or the note about a mesh that d9d added to the job."""
    if job.source.note is not None:
        return job.source.note.removeprefix("mesh: ")
    axis = job.source.auto
    return str(job.mesh) + (f" ({axis} is auto: {job.mesh.sizes()[axis]})" if axis else "")
