"""``d9d explain``, and the part of ``d9d check`` that plans the job."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer
from d9d_core.cli.options import Files, JobPath, NoPlugins, Overrides, Strict, WorldSize, command_app, load_job
from d9d_core.job import JobFile

from d9d_engine.job import Job

explain_app = command_app("explain", "Show what a job does, part by part, and why.")


def check_plan(file: JobFile, world_size: int | None, memory: int | None) -> None:
    """Plan a job and print the numbers of the plan.

    Args:
        file: the job.
        world_size: number of processes; by default, what the mesh needs.
        memory: bytes of a device's memory that the job must fit into; any if absent.

    Raises:
        D9dError: the job cannot run, or does not fit.
    """
    from d9d_engine.build.communication.nodes import node_warning, processes_of_node
    from d9d_engine.cli.report import print_plan  # imports torch, which a wrong job never needs
    from d9d_engine.planner.check import predicted

    job = Job.of(file)
    plan = job.plan(world_size)
    node = processes_of_node(job.device)
    outlook = predicted(job, memory, node)
    if outlook.price is not None:  # one warning, with the price in the place of a guess
        tp, unpriced = job.mesh.tp, node_warning(job.mesh.tp, node, plan.collectives)
        priced = node_warning(tp, outlook.node, plan.collectives, outlook.price)
        others = [warning for warning in plan.warnings if warning != unpriced]
        plan = replace(plan, warnings=[*others, *([] if priced is None else [priced])])
    print_plan(job, plan, outlook.lines)


@explain_app.command()
def explain(
    job: JobPath,
    world_size: WorldSize = None,
    rank: Annotated[int, typer.Option(help="Number of the process whose stages and collectives are shown.")] = 0,
    overrides: Overrides = [],  # noqa: B006 - typer reads the default
    plugin: Files = [],  # noqa: B006
    no_plugins: NoPlugins = False,
    strict_plugins: Strict = False,
) -> None:
    """Show what a job does: where each component comes from, what was applied in which order, and why."""
    from d9d_engine.cli.report import print_explanation

    loaded = load_job(Job, job, overrides, plugin, no_plugins, strict_plugins, world_size=world_size)
    print_explanation(loaded, loaded.plan(world_size, rank))
