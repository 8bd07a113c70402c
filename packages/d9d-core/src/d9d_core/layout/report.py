"""Report of a layout that does not fit: one error with every problem at its line, and an edit that solves them."""

from __future__ import annotations

from d9d_core.config import Location
from d9d_core.errors import D9dError, JobError
from d9d_core.job_file.document import Document
from d9d_core.job_file.job import BaseJob
from d9d_core.job_file.resolve import Parts
from d9d_core.layout.auto import Source
from d9d_core.layout.check import layout_problems
from d9d_core.layout.mend import edit, mended
from d9d_core.registry.capabilities import Circumstances, judge
from d9d_core.registry.registry import Registry


def check_layout(job: BaseJob, selection: Parts, registry: Registry, world_size: int, source: Source) -> None:
    """Check mesh, strategies, schedule and batch together, and report all problems in one error.

    Unsatisfied capability tokens are reported along with problems of the layout, because a corrected layout must
    satisfy them too. Without problems of the layout, the check of capabilities reports these tokens later.

    Args:
        job: job whose sections are valid one by one.
        selection: records of the job.
        registry: registry that resolves names.
        world_size: number of processes.
        source: source of the job.

    Raises:
        D9dError: one line per problem; a note has an edit that solves all of them, if one was found. The schedule's own
            error if that is the only problem; else a :class:`~d9d_core.errors.JobError`.
    """
    problems = layout_problems(job, selection, registry, world_size, source.auto)
    if not problems:
        return
    document = source.document
    lines = [
        f"{where}: {problem.text}" if (where := _where(document, problem.location)) else problem.text
        for problem in problems
    ]
    verdicts = judge(selection.all(), registry, Circumstances(job.mesh.sizes()))
    lines += [f"{v.chosen.where}: {v.reason}" for v in verdicts if v.satisfied is False]
    only = problems[0].error if len(lines) == 1 else None
    error: D9dError = only or JobError("\n".join(lines))
    if (fitting := mended(job, registry, world_size)) is not None and (text := edit(job, fitting)):
        error.add_note(f"to correct it, write in {document.source or 'the job file'}:\n{text}")
    raise error


def _where(document: Document, location: Location) -> str:
    """File and line, or ``--set`` override, of a problem. For batch sizes, any override of the section is named."""
    given = document.where(location[:1], whole=True) if location[0] == "batch" else ""
    return given if given.startswith("--set") else document.where(location, whole=True)
