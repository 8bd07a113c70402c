"""Command ``d9d torchft run``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from d9d_core.errors import JobError
from d9d_core.job import JobFile
from d9d_core.registry.policy import PluginPolicy
from d9d_core.untrusted import visible

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)


@app.command()
def run(
    job: Annotated[Path, typer.Argument(metavar="JOB", help="Job file: YAML, TOML or JSON.")],
    replicas: Annotated[int, typer.Option(metavar="R", help="Number of replicas.", min=1)] = 2,
    max_restarts: Annotated[int, typer.Option(metavar="N", help="Number of restarts of each replica.", min=0)] = 10,
    overrides: Annotated[
        list[str],
        typer.Option("--set", metavar="FIELD=VALUE", help="Override a field of the job file; may be repeated."),
    ] = [],  # noqa: B006 - typer reads the default
    plugin: Annotated[
        list[Path], typer.Option("--plugin", metavar="FILE", help="A Python file to load as a plugin; may be repeated.")
    ] = [],  # noqa: B006
) -> None:
    """Train. Replica K has the run NAME-K, with its own checkpoints and its own copy of the trained model."""
    from d9d_torchft.supervisor import Supervisor

    loaded = JobFile.load(job, overrides=overrides, policy=PluginPolicy(files=tuple(plugin)))
    ranks = loaded.mesh.world_size
    loaded.check(ranks)
    if not any(one.selector == "torchft" for one in loaded.parallel):
        raise JobError("parallel: the strategy torchft is missing; add it, such as --set parallel='[torchft]'")
    options = [word for option in overrides for word in ("--set", option)]
    options += [word for file in plugin for word in ("--plugin", str(file))]
    options += ["--nproc", str(ranks)] if ranks > 1 else []

    def command(name: str) -> list[str]:
        own = ["--set", f"run.name={loaded.run.name}-{name}"]
        return [sys.executable, "-m", "d9d_core", "train", str(job), *options, *own]

    def say(text: str) -> None:
        typer.echo(visible(text), err=True)

    names = [str(index) for index in range(replicas)]
    raise typer.Exit(Supervisor(command, names, max_restarts, say).run())
