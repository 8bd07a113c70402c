"""Command ``d9d launch submit``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from d9d_core.cli.options import (
    Files,
    JobPath,
    Memory,
    NoPlugins,
    Overrides,
    Strict,
    bytes_of,
    command_app,
    discover_plugins,
    echo,
    load_job,
)

app = command_app()


@app.command()
def submit(
    job: JobPath,
    engine: Annotated[str, typer.Option(metavar="NAME", help="Engine to submit to, such as slurm.")],
    nodes: Annotated[int, typer.Option(metavar="N", help="Number of machines.", min=1)] = 1,
    processes: Annotated[
        int, typer.Option(metavar="N", help="Number of processes on each machine, usually one per GPU.", min=1)
    ] = 1,
    option: Annotated[
        list[str], typer.Option("--option", metavar="FIELD=VALUE", help="Option of the engine; may be repeated.")
    ] = [],  # noqa: B006 - typer reads the default
    options: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File with options of the engine: YAML, TOML or JSON.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the files and the command; write and submit nothing.")
    ] = False,
    memory: Memory = None,
    overrides: Overrides = [],  # noqa: B006
    plugin: Files = [],  # noqa: B006
    no_plugins: NoPlugins = False,
    strict_plugins: Strict = False,
) -> None:
    """Check a job for all its processes, then submit it. An engine's options are the fields of its plugin."""
    from d9d_core.cli.check import check_job
    from d9d_engine.job import Job
    from d9d_engine.launch.start import option_words
    from d9d_engine.machines import require_whole_groups, sizes_named

    from d9d_launch.engine import build_launcher, engine_config, read_options
    from d9d_launch.submit import Engine, refuse_second, request_for
    from d9d_launch.submit import dry_run as shown
    from d9d_launch.submit import submit as submit_request

    size = bytes_of(memory)
    registry = discover_plugins(plugin, no_plugins)
    config = engine_config(registry, engine, read_options(options, option))
    launcher = build_launcher(registry, engine, config)
    world_size = nodes * processes
    loaded = load_job(Job, job, overrides, plugin, no_plugins, strict_plugins, world_size=world_size)
    if not dry_run:
        launcher.require()
    with sizes_named(loaded.mesh.world_size, nodes, processes, "--processes"):
        if loaded.mesh.world_size == world_size:
            require_whole_groups(loaded.mesh.tp, nodes, processes)
        check_job(loaded, world_size, size)
    words = option_words([], [file.absolute() for file in plugin], no_plugins, strict_plugins)
    request = request_for(loaded, job, nodes, processes, words)
    submission = launcher.prepare(request)
    if dry_run:
        echo(shown(request, submission))
        return
    refuse_second(launcher, engine, request.folder)
    target = Engine(engine, config.model_dump(mode="json", exclude={"name"}), launcher)
    identifier = submit_request(target, request, submission)
    echo(f"submitted to {engine} as {identifier}; to follow it: d9d launch status {loaded.run.directory}")
