"""Command ``d9d infer``."""

from __future__ import annotations

import os
from collections.abc import Callable

import typer
from d9d_core.cli.garbage import collected_seldom
from d9d_core.cli.options import Files, JobPath, NoPlugins, Overrides, Strict, command_app, echo, load_job
from d9d_core.cli.streams import output_is_incidental
from d9d_core.errors import JobError
from d9d_engine.launch.process import Process, running
from d9d_engine.launch.start import (
    Alone,
    Nproc,
    for_processes,
    joined_process,
    launch,
    option_words,
    process_of_launcher,
    start_up,
)
from d9d_engine.run.interrupt import STOPPED, Interrupts, Terminated

from d9d_inference.job import InferenceJob

app = command_app()


@app.command()
def infer(
    job: JobPath,
    overrides: Overrides = [],  # noqa: B006 - typer reads the default
    plugin: Files = [],  # noqa: B006
    no_plugins: NoPlugins = False,
    strict_plugins: Strict = False,
    nproc: Nproc = None,
    alone: Alone = False,
) -> None:
    """Run the model over all rows of the data and write <run>/output. Continues after the rows of an earlier start."""
    with Interrupts().noted() as interrupts:
        output_is_incidental()
        try:
            env = process_of_launcher(os.environ, alone)
            if nproc is None:
                with running(env, os.environ, interrupts) as process:
                    status = _infer(
                        process,
                        interrupts,
                        lambda: load_job(
                            InferenceJob, job, overrides, plugin, no_plugins, strict_plugins, process.repeats
                        ),
                    )
                raise typer.Exit(status)
            if env.launcher is not None:
                raise JobError(f"--nproc: {env.launcher} has started this process; use its own options")

            def load(world_size: int | None, again: bool) -> InferenceJob:
                return load_job(InferenceJob, job, overrides, plugin, no_plugins, strict_plugins, again, world_size)

            with interrupts.raised():
                loaded = for_processes(load, nproc)
            options = option_words(overrides, plugin, no_plugins, strict_plugins)
            raise typer.Exit(launch(loaded, ["infer", str(job), *options], 0, interrupts))
        except Terminated as signal:
            typer.echo(f"{signal}: stopped during start-up; nothing was computed", err=True)
            raise typer.Exit(STOPPED) from None


def _infer(process: Process, interrupts: Interrupts, load: Callable[[], InferenceJob]) -> int:
    """Infer in this process; return the exit status."""

    def import_modules() -> None:
        import d9d_inference.compose  # noqa: F401

    with joined_process(process, interrupts, load, import_modules, "computed") as (loaded, topology, start, alone):
        with start_up(interrupts, alone, "computed"), collected_seldom():
            inference = loaded.build(topology=topology, observers=[start], interrupts=interrupts, owning=True)
        outcome = inference.run()
    if outcome.status == "stopped":
        return process.stop_status
    if topology.is_main:
        for name, value in outcome.values.items():
            echo(f"{name} {value:,.6g}")
        echo(f"finished {outcome.samples:,} samples; rows in {inference.store.output}")
    return 0
