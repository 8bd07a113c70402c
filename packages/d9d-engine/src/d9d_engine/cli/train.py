"""Command ``d9d train``."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Annotated

import typer
from d9d_core.cli.garbage import collected_seldom
from d9d_core.cli.options import Files, JobPath, NoPlugins, Overrides, Strict, command_app, echo, load_job
from d9d_core.cli.streams import output_is_incidental
from d9d_core.errors import JobError

from d9d_engine.job import Job
from d9d_engine.launch.process import Process, running
from d9d_engine.launch.start import (
    Alone,
    Nproc,
    for_processes,
    joined_process,
    launch,
    machines_of,
    option_words,
    process_of_launcher,
    start_up,
)
from d9d_engine.run.interrupt import STOPPED, Interrupts, Terminated

app = command_app()


@app.command()
def train(
    job: JobPath,
    overrides: Overrides = [],  # noqa: B006 - typer reads the default
    plugin: Files = [],  # noqa: B006
    no_plugins: NoPlugins = False,
    strict_plugins: Strict = False,
    nproc: Nproc = None,
    max_restarts: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Number of restarts of all processes after one of them died; implies --nproc.", min=0
        ),
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(metavar="N", help="Machines; start the command on each of them, with --nproc.")
    ] = None,
    node_rank: Annotated[
        int | None, typer.Option(metavar="K", help="Number of this machine, from 0; a different one on each machine.")
    ] = None,
    master: Annotated[
        str | None, typer.Option(metavar="HOST[:PORT]", help="Address of machine 0, where all processes meet.")
    ] = None,
    alone: Alone = False,
) -> None:
    """Train. Continues from the newest checkpoint of the run, if there is one."""
    with Interrupts().noted() as interrupts:
        output_is_incidental()
        try:
            machines = machines_of(nodes, node_rank, master)
            env = process_of_launcher(os.environ, alone, machines)
            if nproc is None and max_restarts is None and machines is None:
                with running(env, os.environ, interrupts) as process:
                    status = _train(
                        process,
                        interrupts,
                        lambda: load_job(Job, job, overrides, plugin, no_plugins, strict_plugins, process.repeats),
                    )
                raise typer.Exit(status)
            if env.launcher is not None:
                raise JobError(f"--nproc, --max-restarts: {env.launcher} has started this process; use its own options")

            def load(world_size: int | None, again: bool) -> Job:
                return load_job(Job, job, overrides, plugin, no_plugins, strict_plugins, again, world_size)

            if machines is not None and alone:
                raise JobError("--alone: --nodes, --node-rank and --master name several machines; leave out --alone")
            if machines is not None and max_restarts:
                raise JobError(
                    "--max-restarts: machines cannot start again together; leave this to the launcher of the machines"
                )
            with interrupts.raised():
                loaded = for_processes(load, nproc, 1 if machines is None else machines.count)
            options = option_words(overrides, plugin, no_plugins, strict_plugins)
            status = launch(loaded, ["train", str(job), *options], max_restarts or 0, interrupts, machines)
            raise typer.Exit(status)
        except Terminated as signal:
            typer.echo(f"{signal}: stopped during start-up; nothing was trained", err=True)
            raise typer.Exit(STOPPED) from None


def _train(process: Process, interrupts: Interrupts, load: Callable[[], Job]) -> int:
    """Train in this process; return the exit status."""

    def import_modules() -> None:
        import d9d_engine.compose.training  # noqa: F401

    with joined_process(process, interrupts, load, import_modules) as (loaded, topology, start, alone):
        with start_up(interrupts, alone), collected_seldom():
            trainer = loaded.build(topology=topology, observers=[start], interrupts=interrupts, owning=True)
        outcome = trainer.train()
    if outcome.status == "stopped":
        return process.stop_status
    if topology.is_main:
        echo(f"finished {outcome.step} steps; results in {loaded.run.directory}")
    return 0
