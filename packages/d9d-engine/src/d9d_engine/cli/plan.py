"""Command ``d9d explain``, and the job check ``plan`` of ``d9d check``."""

from __future__ import annotations

from typing import Annotated

import typer
from d9d_core.cli.options import Files, JobPath, NoPlugins, Overrides, Strict, WorldSize, command_app, load_job
from d9d_core.job import JobFile

from d9d_engine.job import Job

explain_app = command_app()


def check_plan(file: JobFile, world_size: int | None) -> None:
    """Plan a job and print a summary of the plan.

    Args:
        file: job file.
        world_size: number of processes; by default, the product of the mesh axes.

    Raises:
        D9dError: the job cannot run.
    """
    from d9d_engine.cli.report import print_plan  # imports torch; an invalid job fails before

    job = Job.of(file)
    print_plan(job, job.plan(world_size))


@explain_app.command()
def explain(
    job: JobPath,
    world_size: WorldSize = None,
    rank: Annotated[int, typer.Option(metavar="K", min=0, help="Rank whose stages and collectives are shown.")] = 0,
    overrides: Overrides = [],  # noqa: B006 - typer reads the default
    plugin: Files = [],  # noqa: B006
    no_plugins: NoPlugins = False,
    strict_plugins: Strict = False,
) -> None:
    """Show a job's components, their plugins, the order of strategies, and the reasons for automatic choices."""
    from d9d_engine.cli.report import print_explanation

    loaded = load_job(Job, job, overrides, plugin, no_plugins, strict_plugins, world_size=world_size)
    print_explanation(loaded, loaded.plan(world_size, rank))
