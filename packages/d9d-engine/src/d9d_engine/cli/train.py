"""``d9d train``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Annotated, TypeVar

import typer
from d9d_core.cli.interrupts import interrupts_deferred
from d9d_core.cli.options import Files, JobPath, NoPlugins, Overrides, Strict, command_app, load_job
from d9d_core.errors import JobError

from d9d_engine.inference.job import InferenceJob
from d9d_engine.job import Job
from d9d_engine.joining import print_note
from d9d_engine.launch.process import Process, running
from d9d_engine.process_env import ProcessEnv
from d9d_engine.run.interrupt import Interrupts, Terminated
from d9d_engine.run.startup import StartUp

Runs = TypeVar("Runs", Job, InferenceJob)

app = command_app("train", "Train, or continue after an interruption.")


@app.command()
def train(
    job: JobPath,
    overrides: Overrides = [],  # noqa: B006 - typer reads the default
    plugin: Files = [],  # noqa: B006
    no_plugins: NoPlugins = False,
    strict_plugins: Strict = False,
    nproc: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="Start this many processes here; 'auto': as many as the mesh needs, or as there are devices.",
        ),
    ] = None,
    max_restarts: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="How often to start all processes again after one died; implies --nproc.", min=0
        ),
    ] = None,
) -> None:
    """Train. Continues from the newest checkpoint of the run, if there is one."""
    with Interrupts().noted() as interrupts:
        try:
            env = ProcessEnv.from_environment(os.environ)
            if nproc is None and max_restarts is None:
                with running(env, os.environ, interrupts) as process:
                    _train(
                        process,
                        interrupts,
                        lambda: load_job(Job, job, overrides, plugin, no_plugins, strict_plugins, process.repeats),
                    )
                return
            if env.launcher is not None:
                raise JobError(f"--nproc, --max-restarts: {env.launcher} has started this process; tell it instead")

            def load(world_size: int | None, again: bool) -> Job:
                return load_job(Job, job, overrides, plugin, no_plugins, strict_plugins, again, world_size)

            with interrupts.raised():
                loaded = for_processes(load, nproc)
            options = [word for option in overrides for word in ("--set", option)]
            options += [word for file in plugin for word in ("--plugin", str(file))]
            options += ["--no-plugins"] * no_plugins + ["--strict-plugins"] * strict_plugins
            status = launch(loaded, ["train", str(job), *options], max_restarts or 0, interrupts)
            raise typer.Exit(status)
        except Terminated:
            typer.echo("SIGTERM: stopped during start-up; nothing was trained", err=True)


def _train(process: Process, interrupts: Interrupts, load: Callable[[], Job]) -> None:
    env = process.env
    with StartUp(print_note, shown=env.rank == 0, processes=env.world_size) as start:
        start.ends("plugins", following="job")
        _train_timed(process, interrupts, load, start)


def _train_timed(process: Process, interrupts: Interrupts, load: Callable[[], Job], start: StartUp) -> None:
    env = process.env
    # A process that is alone may end as soon as it is asked, and says why it failed on its way out, as every command
    # does. Others stop together, after their first step.
    alone = env.launcher is None
    with start_up(interrupts, alone):
        loaded = load()
        loaded.check(env.world_size)
        if loaded.source.note is not None and not process.repeats:
            print_note(loaded.source.note)
    start.ends("job", following="torch")
    with start_up(), interrupts_deferred():
        # Imports of torch and numpy, once and for all that follows.
        import torch  # noqa: F401

        start.ends("torch", following="modules")
        import d9d_engine.build.compose
        import d9d_engine.distributed.world  # noqa: F401
        from d9d_engine.distributed.mesh import describe_rank

    start.ends("modules", following="plan" if alone else "processes")
    reporter = None if alone else process.reporter(describe_rank(loaded.mesh.sizes(), env.rank))
    with loaded.joined(env, reporter) as topology:
        if not alone:
            start.ends("processes", following="plan")
        with start_up(interrupts, alone):
            trainer = loaded.build(topology=topology, observers=[start], interrupts=interrupts)
        outcome = trainer.train()
    if outcome.status == "finished" and topology.is_main:
        typer.echo(f"finished {outcome.step} steps; results in {loaded.run.directory}")


@contextmanager
def start_up(interrupts: Interrupts | None = None, alone: bool = False) -> Iterator[None]:
    """Start-up of a command inside the block: an interruption says that nothing was done."""
    try:
        with interrupts.raised() if interrupts is not None and alone else nullcontext():
            yield
    except Terminated:
        raise
    except KeyboardInterrupt:
        raise KeyboardInterrupt("during start-up; nothing was trained") from None


def for_processes(load: Callable[[int | None, bool], Runs], nproc: str | None) -> Runs:
    """The job, checked for the processes that will be started.

    Args:
        load: number of processes, if known, and whether the job is read again -> the job.
        nproc: a number; ``auto``; ``None`` is what the mesh needs.
    """
    if nproc is not None and nproc != "auto":
        if not nproc.isdecimal() or int(nproc) < 1:
            raise JobError(f"--nproc: '{nproc}' is neither a number nor auto")
        job = load(int(nproc), False)
        job.check(int(nproc))
        return job
    job = load(1, False)
    processes = job.mesh.world_size
    if job.source.auto is not None or (nproc == "auto" and "mesh" not in job.model_fields_set):
        with start_up(), interrupts_deferred():
            from d9d_engine.distributed.devices import count_devices
        processes = count_devices(job.device)
        job = load(processes, True) if processes > 1 else job
    job.check(processes)
    return job


def launch(job: Job | InferenceJob, arguments: list[str], restarts: int, interrupts: Interrupts) -> int:
    """Start the processes of a job here, and wait for them; returns the exit status."""
    from d9d_engine.launch.agent import Launch

    if job.source.note is not None:
        print_note(job.source.note)
    with start_up(), interrupts_deferred():
        from d9d_engine.distributed.mesh import describe_rank

    def name_of(rank: int) -> str:
        return describe_rank(job.mesh.sizes(), rank)

    processes = job.mesh.world_size
    return Launch(("-m", "d9d_core", *arguments), processes, restarts, name_of, job.timeouts.startup).run(interrupts)
