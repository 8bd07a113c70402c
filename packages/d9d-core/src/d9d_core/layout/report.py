"""Report of a layout that does not fit: one error with every problem at its line, and the edit that mends them."""

from __future__ import annotations

from d9d_core.errors import D9dError, JobError
from d9d_core.job_file.job import BaseJob
from d9d_core.job_file.resolve import Parts
from d9d_core.layout.auto import Source
from d9d_core.layout.check import layout_problems
from d9d_core.layout.mend import edit, mended
from d9d_core.registry.capabilities import Circumstances, judge
from d9d_core.registry.registry import Registry


def check_layout(job: BaseJob, selection: Parts, registry: Registry, world_size: int, source: Source) -> None:
    """Report a layout that does not fit, after a check of mesh, strategies, schedule and batch together.

    Requirements that do not hold are added to other problems, because a layout that is mended must hold them; they
    alone are left to the check of capabilities.

    Args:
        job: validated, section by section.
        selection: its records.
        registry: meaning of its names.
        world_size: number of processes.
        source: where it was read.

    Raises:
        D9dError: one line per problem; its note has the edit that mends it. Of the kind that a schedule has raised, if
            that is the only problem; else a :class:`~d9d_core.errors.JobError`.
    """
    problems = layout_problems(job, selection, registry, world_size, source.auto)
    if not problems:
        return
    document = source.document
    lines = [
        f"{where}: {problem.text}" if (where := document.where(problem.location)) else problem.text
        for problem in problems
    ]
    verdicts = judge(selection.all(), registry, Circumstances(job.mesh.sizes()))
    lines += [f"{v.chosen.where}: {v.reason}" for v in verdicts if v.satisfied is False]
    only = problems[0].error if len(lines) == 1 else None
    error: D9dError = only or JobError("\n".join(lines))
    if (fitting := mended(job, registry, world_size)) is not None and (text := edit(job, fitting)):
        error.add_note(f"to mend it, write in {document.source or 'the job file'}:\n{text}")
    raise error
