"""``d9d check``: checks names, values, capabilities, mesh and schedule, then runs the checks of other packages."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from d9d_core.cli.output import length_of, mesh_line
from d9d_core.containment import FOREIGN_FAILURES
from d9d_core.errors import JobError
from d9d_core.job import JobFile
from d9d_core.job_file.resolve import Resolution, Selection
from d9d_core.plugin import JobCheckSpec
from d9d_core.registry.capabilities import missing_modules
from d9d_core.registry.entries import plugin_error, shown
from d9d_core.terminal.console import console_for

#: Job checks of first-party packages: name -> summary, and the distribution that provides the check.
_OURS = {
    "plan": ("Model, strategies and kernels, without a GPU.", "d9d-engine"),
    "prediction": ("Predicted memory of the busiest device.", "d9d-planner"),
}


def check_job(job: JobFile, world_size: int | None, memory: int | None = None) -> None:
    """Run the job checks of the installed packages, and print which checks are left out and how to install them.

    Args:
        job: the job.
        world_size: number of processes; by default, the number that the mesh needs.
        memory: bytes of a device's memory that the job must fit into; ``None`` for no limit.

    Raises:
        D9dError: the job cannot run, or ``memory`` is given and no installed package predicts memory.
    """
    console = console_for()
    resolution = job.check(world_size)
    checks = job.registry.entries("job check")
    left_out = {text: home for name, (text, home) in _OURS.items() if name not in {entry.spec.key for entry in checks}}
    specs = [entry.spec for entry in checks]
    if memory is not None and not any(isinstance(spec, JobCheckSpec) and spec.memory for spec in specs):
        raise JobError("--memory: nothing installed predicts the memory of a job; pip install d9d-planner")
    planned = False
    for entry in checks:
        assert isinstance(entry.spec, JobCheckSpec)
        if missing := missing_modules(entry.spec):
            left_out[entry.spec.summary] = " ".join(missing)
            continue
        try:
            run = entry.spec.run.load()
        except FOREIGN_FAILURES as error:
            raise plugin_error(f"job check {entry}: {entry.spec.run} failed to load: {shown(error)}", error) from error
        run(job, world_size, *([memory] if entry.spec.memory else []))
        planned |= entry.spec.key == "plan"
    if planned:
        console.print(Text.assemble(("ok", "green"), ": this job can run; its data was not read"))
    else:
        _print_parts(console, job, resolution)
    for summary, packages in left_out.items():
        console.print(Text.assemble(("not checked", "yellow"), f" (to check it: pip install {packages}): {summary}"))


def _print_parts(console: Console, job: JobFile, resolution: Resolution[Selection]) -> None:
    """Print names, mesh, batch and length of a job. The check ``plan`` of d9d-engine, if it runs, prints more."""
    table = Table(box=None, show_header=False)
    table.add_row("mesh", mesh_line(job))
    for chosen in resolution.selection.all():
        table.add_row(chosen.where, chosen.spec.name, str(chosen.entry.origin))
    table.add_row("step", f"{job.batch.size} samples, {job.microbatches} microbatch(es) of {job.microbatch_size}")
    table.add_row("run", length_of(job))
    for verdict in resolution.verdicts:
        if verdict.satisfied is None:
            table.add_row("undecided", f"{verdict.chosen.where} needs {verdict.token}: {verdict.reason}")
    console.print(table)
    console.print(Text.assemble(("ok", "green"), ": names, values, capabilities, mesh and schedule"))
