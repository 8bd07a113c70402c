"""Command ``d9d profile``: runs some steps of a job, and shows where their time goes."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Annotated

import typer
from d9d_core.cli.garbage import collected_seldom
from d9d_core.cli.options import Files, JobPath, NoPlugins, Overrides, Strict, command_app, echo, load_job, say
from d9d_core.cli.streams import output_is_incidental
from d9d_core.errors import D9dError, JobError
from d9d_engine.job import Job
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

from d9d_planner.device import Device
from d9d_planner.prediction import predict

app = command_app()
#: Overrides that remove the parts of a job that a profile leaves out.
_OMITTED = (
    "epochs=null", "evaluation=null", "checkpoint.every=null", "trackers=[]", "subscribers=[]", "metrics=[]",
    "export=false", "profiling=null",
)  # fmt: skip
_MANY = 1_000_000_000
_RECORDED = 5


@app.command()
def profile(
    job: JobPath,
    steps: Annotated[int, typer.Option(metavar="N", min=12, help="Steps to run; a third warms up.")] = 30,
    overrides: Overrides = [],  # noqa: B006 - typer reads the default
    plugin: Files = [],  # noqa: B006
    no_plugins: NoPlugins = False,
    strict_plugins: Strict = False,
    nproc: Nproc = None,
    alone: Alone = False,
) -> None:
    """Run some steps, and show how long each kind of work takes, what limits the speed, and changes that would help.

    Nothing is logged, evaluated or saved.
    """
    changed = [*overrides, f"steps={_MANY}", *_OMITTED]
    with Interrupts().noted() as interrupts:
        output_is_incidental()
        try:
            env = process_of_launcher(os.environ, alone)
            if nproc is None:
                with running(env, os.environ, interrupts) as process:
                    _profile(
                        process,
                        interrupts,
                        lambda: load_job(Job, job, changed, plugin, no_plugins, strict_plugins, process.repeats),
                        steps,
                    )
                return
            if env.launcher is not None:
                raise JobError(f"--nproc: {env.launcher} has started this process; use its own options")
            with interrupts.raised():
                loaded = for_processes(
                    lambda size, again: load_job(Job, job, changed, plugin, no_plugins, strict_plugins, again, size),
                    nproc,
                )
            words = option_words(overrides, plugin, no_plugins, strict_plugins)
            status = launch(loaded, ["profile", str(job), "--steps", str(steps), *words], 0, interrupts)
            raise typer.Exit(status)
        except Terminated as signal:
            typer.echo(f"{signal}: stopped; nothing was measured", err=True)
            raise typer.Exit(STOPPED) from None


def _profile(process: Process, interrupts: Interrupts, load: Callable[[], Job], steps: int) -> None:
    def import_modules() -> None:
        import d9d_engine.compose.training  # noqa: F401

        import d9d_planner.profile.measure  # noqa: F401

    with joined_process(process, interrupts, load, import_modules, "measured") as (job, topology, start, alone):
        with start_up(interrupts, alone, "measured"), collected_seldom():
            trainer = job.build(topology=topology, observers=[start], interrupts=interrupts)
        from d9d_planner.profile.measure import measure

        if topology.is_main:
            say(f"profile: {steps} steps; nothing is saved")
        warmup = steps // 3
        with interrupts.raised(), trainer.prefetcher:
            found = measure(trainer, warmup, steps - warmup - _RECORDED - 1, _RECORDED)
        if topology.is_main:
            from d9d_planner.profile.report import lines

            for line in lines(found, job, _predicted(job, topology.device)):
                echo(line)


def _predicted(job: Job, device: object) -> tuple[float | None, str]:
    """Predicted seconds of a step with rates measured on this machine, or the reason why there is no prediction."""
    from d9d_planner.calibrate import calibrated

    known = Device.named("h200")
    try:
        rates = calibrated(device, known, 1)[0]  # type: ignore[arg-type]
        return predict(job, job.registry, job.views(), rates).time.total, ""
    except D9dError as error:
        return None, str(error)
