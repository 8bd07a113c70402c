"""Command ``d9d launch cancel``."""

from __future__ import annotations

from d9d_core.cli.options import Files, NoPlugins, Overrides, command_app, discover_plugins, echo

from d9d_launch.commands.options import Engine, Location

app = command_app()


@app.command()
def cancel(
    run: Location,
    engine: Engine = None,
    overrides: Overrides = [],  # noqa: B006 - typer reads the default
    plugin: Files = [],  # noqa: B006
    no_plugins: NoPlugins = False,
) -> None:
    """End a submission for good: a run that trains saves first, and is not restarted."""
    from d9d_launch.engine import build_launcher, engine_config
    from d9d_launch.record import find_submission

    _, record = find_submission(run, overrides, engine)
    registry = discover_plugins(plugin, no_plugins)
    launcher = build_launcher(registry, record.engine, engine_config(registry, record.engine, record.options))
    echo(f"{record.engine} {record.identifier}: {launcher.cancel(record.identifier)}")
