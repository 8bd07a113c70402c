"""Command ``d9d launch status``."""

from __future__ import annotations

from typing import Annotated

import typer
from d9d_core.cli.options import Files, NoPlugins, Overrides, command_app, discover_plugins, echo

from d9d_launch.commands.options import Engine, Location

app = command_app()


@app.command()
def status(
    run: Location,
    engine: Engine = None,
    lines: Annotated[int, typer.Option(metavar="N", help="Number of lines of the log.", min=0)] = 10,
    overrides: Overrides = [],  # noqa: B006 - typer reads the default
    plugin: Files = [],  # noqa: B006
    no_plugins: NoPlugins = False,
) -> None:
    """Show a submission's state, the run's progress and ending, and its last output. Exit status 1 if it failed."""
    from d9d_launch.engine import build_launcher, engine_config
    from d9d_launch.record import FOLDER, find_submission
    from d9d_launch.report import RunReport

    directory, record = find_submission(run, overrides, engine)
    registry = discover_plugins(plugin, no_plugins)
    launcher = build_launcher(registry, record.engine, engine_config(registry, record.engine, record.options))
    report = RunReport(directory, record, launcher.status(record.identifier, directory / FOLDER, lines))
    for line in report.lines():
        echo(line)
    if report.state == "failed":
        raise typer.Exit(1)
